"""The family `modern`: each part by its formula, and the plain ViT without."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.special
import tiny
from flax.traverse_util import flatten_dict
from series_parts import (
  BEIT,
  CLIP,
  DEIT3,
  DINOV3,
  DISTILLED,
  EVA02,
  REGISTERS,
  SWIGLU,
)  # fmt: skip

from vit_jax.families import model_config
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.zoo.families.modern import ModernConfig
from vit_jax.zoo.models import rope

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
TINY = dict(variant="B/4", width=32, depth=1, mlp_dim=24, num_heads=2)
IMAGES = jnp.asarray(
  np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)), "float32"
)


def modern(**options) -> ModernConfig:
  return model_config(**TINY | dict(name="modern") | options)


TWO = dict(depth=2)  # where blocks differ, or are in a scan


def shapes(options, num_classes=5):
  return tiny.shapes(build(options, num_classes), IMAGES.shape)


def random_params(options, num_classes=5):
  """Parameters without zeros; factors and scales of norms are around 1."""
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    mean = float(path[-1].key == "scale")
    return rng.normal(mean, 0.2, leaf.shape).astype("f")

  return jax.tree_util.tree_map_with_path(draw, shapes(options, num_classes))


def run(options, params, num_classes=5, images=IMAGES, **others):
  model = build(options, num_classes)
  apply = jax.jit(lambda p, x: model.apply({"params": p}, x, **others))
  with jax.default_matmul_precision("highest"):
    return apply(params, images)


# The plain ViT.


def program(name: str, **options) -> str:
  """Text of the gradient of a train step's forward pass."""
  options = model_config(name, **TINY | options)
  model = build(options, 5)

  def loss(params, key):
    logits, _ = model.apply(
      {"params": params}, IMAGES, is_training=True, rngs={"dropout": key}
    )
    return jnp.sum(logits)

  step = jax.jit(jax.grad(loss))
  return step.lower(shapes(options), jax.random.key(0)).as_text()


@pytest.mark.parametrize(
  "options, parts",
  [
    (dict(scan=True, dropout=0.1, stochastic_depth=0.1, dtype="bfloat16"), {}),
    (dict(pool="map"), dict(class_token=False)),
  ],
)
def test_without_parts_the_program_is_that_of_the_plain_vit(options, parts):
  """So the plain one has no operation that a part would need."""
  assert program("vit", **options) == program("modern", **options, **parts)


# The formulas, in numpy.


def normed(x, norm, eps):
  mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(variance + eps) * norm["scale"] + norm["bias"]


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


ACTIVATIONS = {
  "tanh": lambda x: (
    x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
  ),
  "erf": lambda x: x / 2 * (1 + scipy.special.erf(x / 2**0.5)),
  "quick": lambda x: x * sigmoid(1.702 * x),
}


def turned(x, kind, grid):
  """Rotates patches [n, heads, d] as complex numbers, one by one."""
  n = x.shape[-1]
  x = np.array(x)
  for i, j in np.ndindex(grid):
    if kind == "dinov3":
      periods = 100 ** (np.arange(n // 4) / (n / 4))
      y, c = (2 * (k + 0.5) / m - 1 for k, m in zip((i, j), grid, strict=True))
      angle = 2 * np.pi * np.concatenate([y / periods, c / periods])
    else:
      frequencies = 10_000 ** (-np.arange(n // 4) / (n / 4))
      y, c = (16 * k / m for k, m in zip((i, j), grid, strict=True))
      angle = np.concatenate([y * frequencies, c * frequencies])
    token = x[:, i * grid[1] + j]
    halves = kind == "dinov3"
    a = token[..., : n // 2] if halves else token[..., ::2]
    b = token[..., n // 2 :] if halves else token[..., 1::2]
    pairs = (a + 1j * b) * np.exp(1j * angle)
    if halves:
      both = np.concatenate([pairs.real, pairs.imag], -1)
    else:
      both = np.stack([pairs.real, pairs.imag], -1).reshape(token.shape)
    x[:, i * grid[1] + j] = both
  return x


def biases(table, grid):
  """Biases of BEiT, score by score: [heads, queries, keys]."""
  places = [None, *np.ndindex(grid)]
  of_class = {(True, False): -3, (False, True): -2, (True, True): -1}
  result = np.zeros((table.shape[1], len(places), len(places)))
  for q, query in enumerate(places):
    for k, key in enumerate(places):
      if query is None or key is None:
        row = of_class[query is None, key is None]
      else:
        row = (query[0] - key[0] + grid[0] - 1) * (2 * grid[1] - 1)
        row += query[1] - key[1] + grid[1] - 1
      result[:, q, k] = table[row]
  return result


def linear(x, layer, dims="d,de->e"):
  left, right = dims.split(",")
  y = np.einsum(f"bn{left},{right.replace('->', '->bn')}", x, layer["kernel"])
  return y + layer.get("bias", 0)


def attended(x, layer, options, grid):
  num_patches = grid[0] * grid[1]
  query, key, value = (
    linear(x, layer[name], "d,dhe->he") for name in ("query", "key", "value")
  )
  if options.rope:
    for heads in (query, key):
      patches = turned(heads[:, -num_patches:], options.rope, grid)
      heads[:, -num_patches:] = patches
  scores = np.einsum("bqhe,bkhe->bhqk", query, key) / query.shape[-1] ** 0.5
  if options.posemb == "relative_bias":
    scores = scores + biases(layer["relative_bias"], grid)
  mixed = np.einsum("bhqk,bkhe->bqhe", softmax(scores), value)
  return linear(mixed, layer["out"], "he,hed->d")


def mlp_of(x, layer, options):
  hidden = linear(x, layer["Dense_0"])
  if options.mlp == "swiglu":
    gate = linear(x, layer["Gate"])
    hidden = gate * sigmoid(gate) * hidden
  else:
    hidden = ACTIVATIONS[options.gelu](hidden)
  if options.mlp_norm:
    hidden = normed(hidden, layer["LayerNorm_0"], options.ln_eps)
  return linear(hidden, layer["Dense_1"])


def reference(options, params):
  """Logits and intermediates of IMAGES, in float64."""
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  images = np.asarray(IMAGES, np.float64)
  b, h, w, _ = images.shape
  grid, encoder, out = (h // 4, w // 4), p["Transformer"], {}
  x = images.reshape(b, grid[0], 4, grid[1], 4, 3).transpose(0, 1, 3, 2, 4, 5)
  x = np.einsum(
    "bnyxc,yxcd->bnd", x.reshape(b, -1, 4, 4, 3), p["embedding"]["kernel"]
  )
  x = x + p["embedding"].get("bias", 0)
  front = [np.tile(p[k], (b, 1, 1)) for k in ("cls", "dist") if k in p]
  if options.posemb == "learn":
    table = encoder["posembed_input"]["pos_embedding"]
    if options.cls_row:
      x = np.concatenate([*front, x], 1) + table
      front, x = [x[:, : len(front)]], x[:, len(front) :]
    else:
      x = x + table
  if "registers" in p:
    front.append(np.tile(p["registers"], (b, 1, 1)))
  x = np.concatenate([*front, x], 1)
  if options.pre_norm:
    x = normed(x, encoder["pre_norm"], options.ln_eps)
  out["with_posemb"] = x
  for i in range(options.size.depth):
    block = encoder[f"encoderblock_{i}"]
    scales = [
      block.get(f"LayerScale_{k}", {"scale": 1})["scale"] for k in (0, 1)
    ]
    y = normed(x, block["LayerNorm_0"], options.ln_eps)
    y = attended(y, block["MultiHeadDotProductAttention_0"], options, grid)
    x = x + scales[0] * y
    y = normed(x, block["LayerNorm_1"], options.ln_eps)
    x = x + scales[1] * mlp_of(y, block["MlpBlock_0"], options)
    out[f"block {i}"] = x
  if options.final_norm == "tokens":
    x = normed(x, encoder["encoder_norm"], options.ln_eps)
  out["encoded"] = x
  mean = x[:, -grid[0] * grid[1] :].mean(1)
  pooled = {"token": x[:, 0], "gap": mean}
  pooled["token_gap"] = np.concatenate([x[:, 0], mean], -1)
  y = pooled[options.pool]
  if options.final_norm == "pooled":
    y = normed(y, p["pooled_norm"], options.ln_eps)
  if options.projection:
    y = y @ p["projection"]["kernel"]
  out["pooled"] = y
  out["logits"] = y @ p["head"]["kernel"] + p["head"]["bias"]
  if options.distilled:
    second = x[:, 1] @ p["head_dist"]["kernel"] + p["head_dist"]["bias"]
    out["logits"] = (out["logits"] + second) / 2
  return out


PARTS = {
  "DINOv2 with registers, its linear head": (
    REGISTERS | SWIGLU | dict(pool="token_gap")
  ),
  "DINOv3": DINOV3,
  "DINOv3 7B": DINOV3 | SWIGLU | dict(qkv_bias="none"),
  "DeiT distilled": DISTILLED,
  "DeiT III": DEIT3,
  "CLIP": CLIP | dict(gelu="quick", projection=12),
  "EVA-02": EVA02 | dict(mlp_norm=True),
  "BEiT": BEIT,
  "no norm": dict(pool="gap", class_token=False, final_norm="none"),
}


QUICK = ("DINOv3", "CLIP", "EVA-02", "BEiT", "DeiT distilled")


@pytest.mark.parametrize(
  "parts",
  [
    parts if name in QUICK else SLOW(parts, id=name)
    for name, parts in PARTS.items()
  ],
  ids=PARTS,
)
def test_the_formulas(parts):
  options = modern(**parts)
  params = random_params(options)
  logits, out = run(options, params)
  expected = reference(options, params)
  got = {"logits": logits, "with_posemb": out["with_posemb"]}
  got["block 0"] = out["encoderblock_0"]["after_mlp"]
  got |= {k: out[k] for k in ("encoded", "pooled")}
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    # Sums of float32, of values up to some units.
    np.testing.assert_allclose(
      got[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
    )


@pytest.mark.slow
def test_with_distillation_the_features_are_the_mean_of_both_tokens():
  options = modern(distilled=True)
  _, out = run(options, random_params(options))
  np.testing.assert_allclose(
    out["pre_logits"], out["encoded"][:, :2].mean(1), rtol=1e-5, atol=1e-6
  )
  _, out = run(options, random_params(options, 0), 0)
  np.testing.assert_array_equal(out["logits"], out["pre_logits"])


@pytest.mark.slow
def test_attention_pooling_reads_patches_alone():
  options = modern(pool="map", registers=2)
  params = random_params(options)
  _, out = run(options, params)
  probe = {k: v for k, v in params["MAPHead_0"].items()}
  layer = probe["MultiHeadDotProductAttention_0"]
  patches = np.asarray(out["encoded"][:, 3:], np.float64)
  query = linear(probe["probe"], layer["query"], "d,dhe->he")[0, 0]
  key, value = (
    linear(patches, layer[k], "d,dhe->he") for k in ("key", "value")
  )
  scores = np.einsum("he,bkhe->bhk", query, key) / 4
  mixed = np.einsum("bhk,bkhe->bhe", softmax(scores), value)[:, None]
  x = linear(mixed, layer["out"], "he,hed->d")
  y = normed(x, probe["LayerNorm_0"], options.ln_eps)
  expected = (x + mlp_of(y, probe["MlpBlock_0"], modern()))[:, 0]
  np.testing.assert_allclose(out["pooled"], expected, rtol=0, atol=2e-5)


# Rotary positions.


def test_periods_may_be_rounded_as_they_are_stored():
  exact, rounded = (
    rope.angles("dinov3", (1, 1), 64, t) for t in ("float32", "bfloat16")
  )
  np.testing.assert_array_equal(exact, 0)  # the centre
  np.testing.assert_array_equal(rounded, 0)
  exact, rounded = (
    rope.angles("dinov3", (2, 1), 64, t)[0, :16]
    for t in ("float32", "bfloat16")
  )
  periods = -np.pi / rounded  # y = -1/2
  stored = (100 ** (np.arange(16) / 16)).astype(ml_dtypes.bfloat16)
  np.testing.assert_allclose(periods, stored.astype("f"), rtol=1e-12)
  assert 1e-3 < np.abs(exact / rounded - 1).max() < 2**-8


# Training.


EVERYTHING = dict(
  layer_scale=0.5,
  registers=2,
  rope="dinov3",
  qkv_bias="no_key",
  pre_norm=True,
  patch_bias=False,
  mlp="swiglu",
  mlp_norm=True,
  pool="token_gap",
  final_norm="pooled",
  projection=8,
)


def logits_and_gradients(**options):
  parts = TWO | EVERYTHING
  options = modern(**parts | options)
  model, params = build(options, 5), random_params(modern(**parts))
  params = stack_blocks(params, ViTConfig) if options.scan else params

  def loss(params):
    logits, _ = model.apply({"params": params}, IMAGES, is_training=True)
    return jnp.sum(logits**2), logits

  with jax.default_matmul_precision("highest"):
    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return np.asarray(logits), unstack_blocks(jax.device_get(grads), ViTConfig)


@pytest.mark.slow
@pytest.mark.parametrize("scan, remat", [(True, "none"), (False, "full")])
def test_scan_and_remat_change_no_number(scan, remat):
  logits, grads = logits_and_gradients(scan=scan, remat=remat)
  expected_logits, expected = logits_and_gradients()
  # The same sums, maybe in another order: some units of float32 rounding.
  np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
  got, expected = (flatten_dict(g, sep="/") for g in (grads, expected))
  assert got.keys() == expected.keys()
  assert all(np.abs(v).max() > 0 for v in expected.values())
  largest = max(np.abs(v).max() for v in expected.values())
  for path in expected:
    np.testing.assert_allclose(
      got[path], expected[path], rtol=1e-4, atol=1e-6 * largest, err_msg=path
    )


@pytest.mark.slow
def test_stochastic_depth_may_be_the_same_in_all_blocks():
  noise = np.random.default_rng(0).uniform(-1, 1, (1000, 4, 8, 3))
  images = jnp.asarray(noise, "float32")
  options = modern(
    **TWO | EVERYTHING | dict(width=8, mlp_dim=8, posemb="none"),
    stochastic_depth=0.5,
    stochastic_depth_rule="constant",
  )
  params, rngs = random_params(options), {"dropout": jax.random.key(1)}
  _, plain = run(options, params, images=images)
  _, out = run(options, params, images=images, is_training=True, rngs=rngs)
  for i in range(2):
    for branch in ("attention", "mlp"):
      is_dropped = np.all(out[f"encoderblock_{i}"][branch] == 0, (1, 2))
      # Standard deviation sqrt(0.25 / 1000) = 0.016; 4 of them.
      assert np.mean(is_dropped) == pytest.approx(0.5, abs=0.064)
  first = out["encoderblock_0"]["attention"]
  survives = ~np.all(first == 0, (1, 2))
  np.testing.assert_allclose(
    first[survives],
    plain["encoderblock_0"]["attention"][survives] * 2,
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.slow
def test_half_the_bits():
  for kind in ("dinov3", "eva02"):
    parts = EVERYTHING | dict(rope=kind)
    params = random_params(modern(**parts))
    exact, _ = run(modern(**parts), params)
    got, out = run(modern(**parts, dtype="bfloat16"), params)
    assert got.dtype == out["encoded"].dtype == "float32"
    assert out["with_posemb"].dtype == "bfloat16"
    error = np.abs(got - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05  # 2^-8, of some dozens of operations


def test_initial_values_of_the_parts():
  parts = dict(layer_scale=1e-5, registers=64)
  made = functools.partial(modern, width=128, **parts)

  @jax.jit
  def params(key):  # what is not returned is not computed
    with_projection, distilled = (
      build(options, 5).init(key, IMAGES)["params"]
      for options in (made(projection=256), made(distilled=True))
    )
    block = with_projection["Transformer"]["encoderblock_0"]
    return {
      "scales": [block[f"LayerScale_{k}"]["scale"] for k in (0, 1)],
      "zeros": [
        with_projection["cls"],
        *(distilled[k]["kernel"] for k in ("head", "head_dist")),
      ],
      "registers": with_projection["registers"],
      "projection": with_projection["projection"]["kernel"],
      "dist": distilled["dist"],
    }

  got = params(jax.random.key(0))
  assert all((x == np.float32(1e-5)).all() for x in got["scales"])
  assert not any(x.any() for x in got["zeros"])
  # 8,192 and 32,768 numbers: 4 deviations of the spread; 128 numbers.
  assert np.std(got["registers"]) == pytest.approx(0.02, rel=0.032)
  assert np.std(got["projection"]) == pytest.approx(128**-0.5, rel=0.016)
  assert np.std(got["dist"]) == pytest.approx(0.02, rel=0.25)


# RoPE with rescaled coordinates, as in DINOv3's training.


def rescaled_run(seed=0, **options):
  rope = TWO | dict(posemb="none", rope="dinov3")
  options = modern(**rope, rope_rescale=2.0, **options)
  rngs = {"dropout": jax.random.key(seed)}
  params = random_params(modern(**rope))
  if options.scan:
    params = stack_blocks(params, options)
  kwargs = dict(is_training=True, records=jnp.array([0, 1]), rngs=rngs)
  return run(options, params, **kwargs)[0]


def test_rope_is_rescaled_by_a_factor_for_each_block(monkeypatch):
  """In training only; the factors are the same for all records."""
  factors, rescaled = [], rope.Angles.rescaled

  def observed(self, factor):
    factors.append(factor)
    return rescaled(self, factor)

  monkeypatch.setattr(rope.Angles, "rescaled", observed)
  options = modern(**TWO, posemb="none", rope="dinov3", rope_rescale=2.0)
  variables, model = {"params": random_params(options)}, build(options, 5)

  def factors_of(records, is_training=True):
    rngs = {"dropout": jax.random.key(0)}
    kwargs = dict(is_training=is_training, records=records, rngs=rngs)
    factors.clear()
    model.apply(variables, IMAGES, **kwargs)
    return list(factors)

  first, second = jax.jit(factors_of)(jnp.array([0, 1]))
  assert [first, second] == jax.jit(factors_of)(jnp.array([7, 3]))
  assert first != second and all(0.5 <= x <= 2.0 for x in (first, second))
  assert not jax.eval_shape(lambda x: factors_of(x, False), jnp.array([0, 1]))


def test_rescaled_rope_is_that_of_rescaled_coordinates():
  options = modern(posemb="none", rope="dinov3", depth=1)
  table = rope.unscaled(options, (4, 6), 25)
  got, want = table.rescaled(jnp.float32(1)), rope.rotation(options, (4, 6), 25)
  np.testing.assert_allclose(got.cos, want.cos, atol=2e-6)
  np.testing.assert_allclose(got.sin, want.sin, atol=2e-6)
  half = table.rescaled(jnp.float32(0.5))
  # cos(x) = 2 cos(x / 2)^2 - 1
  np.testing.assert_allclose(2 * half.cos**2 - 1, want.cos, atol=4e-6)


@pytest.mark.slow
def test_rescaled_rope_in_a_scan_and_for_parts_of_a_batch():
  logits = rescaled_run()
  np.testing.assert_allclose(rescaled_run(scan=True), logits, atol=1e-5)
  assert np.abs(rescaled_run(seed=1) - logits).max() > 1e-3


def test_rescaling_is_of_training_alone():
  options = modern(rope="dinov3", rope_rescale=2.0)
  assert options.for_inference() == modern(rope="dinov3")


# Options that do not fit.


@pytest.mark.parametrize(
  "parts, option",
  [
    (dict(class_token=False), "class_token"),
    (dict(distilled=True, pool="gap"), "pool"),
    (dict(posemb="relative"), "posemb"),
    (dict(posemb="relative_bias", registers=4), "registers"),
    (dict(posemb_at="blocks"), "posemb_at"),
    (dict(rope="eva02", width=36, num_heads=2), "num_heads"),
    (dict(rope_rescale=2.0), "rope_rescale"),
    (dict(gelu="quick", pool="map"), "gelu"),
    (dict(pre_logits=True, pool="token_gap"), "pre_logits"),
    (dict(layer_scale=0.0), "layer_scale"),
    (dict(registers=-1), "registers"),
    (dict(projection=0), "projection"),
  ],
)
def test_options_that_do_not_fit(parts, option):
  (error,) = model_config("modern", **parts).errors()
  assert error.startswith(f"config.model.{option}: got")

"""Both families of Transformers, compared with their equations in numpy.

`reference.py` has the equations. All intermediates, the attention weights, the
attention map, and a part of the tokens are compared for each case.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
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
from vit_jax.models import build, inspection
from vit_jax.models.chip_choices import CHOICES, Choices
from vit_jax.models.posemb import LearnedOn
from vit_jax.models.resample import resample_posemb
from vit_jax.models.stacking import stack_blocks, unstack_blocks

TINY = dict(variant="B/4", width=16, depth=2, mlp_dim=24, num_heads=2)
IMAGES = jnp.asarray(
  np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)), "f"
)
LARGE = IMAGES.repeat(2, 1).repeat(2, 2)
KEEP = np.array([[5, 0, 2], [1, 4, 3]])  # of a grid of 2 x 3
QUICK = {
  "plain": {},
  "relative": dict(posemb="relative", pool="gap", pre_logits=True),
  "positions in blocks": dict(
    posemb="learn2d", posemb_at="blocks", scan=True, ln_eps=0.1
  ),
  "fixed": dict(posemb="sincos2d", pool="map", gelu="erf"),
  "DINOv3": DINOV3,
  "DeiT distilled": DISTILLED,
  "CLIP": CLIP | dict(gelu="quick", projection=12),
  "EVA-02": EVA02 | dict(mlp_norm=True),
  "BEiT": BEIT,
}
EVERYTHING = dict(
  name="modern",
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
SLOW = {
  "no row of the class token": dict(cls_row=False),
  "no positions": dict(posemb="none", pool="gap"),
  "shared": dict(posemb="learn2d", posemb_at="shared", cls_row=False),
  "relative in a scan": dict(posemb="relative", scan=True, remat="full"),
  "tables in blocks": dict(posemb_at="blocks", cls_row=False),
  "half the bits": dict(
    dtype="bfloat16", posemb="sincos2d", pool="map", pre_logits=True
  ),
  "hybrid": dict(variant="R+Ti/4", stage_width=0.5),
  "DINOv2 with registers, its linear head": (
    REGISTERS | SWIGLU | dict(pool="token_gap")
  ),
  "DINOv3 7B": DINOV3 | SWIGLU | dict(qkv_bias="none", scan=True),
  "DeiT III": DEIT3,
  "BEiT in a scan": BEIT | dict(scan=True),
  "two class tokens, registers": DISTILLED | dict(registers=3, pre_norm=True),
  "registers, pooled by a probe": dict(name="modern", registers=2, pool="map"),
  "registers, mean": dict(name="modern", registers=1, pool="gap"),
  "no norm": dict(
    name="modern", pool="gap", class_token=False, final_norm="none"
  ),
  "everything, half the bits": EVERYTHING | dict(dtype="bfloat16"),
}
CASES = QUICK | SLOW


class Made(NamedTuple):
  """A model with random parameters, and what it should compute.

  Attributes:
    options, model, images: What is applied to what.
    params: The parameters with a block beside the other.
    own: The same as the model has them: stacked, where blocks are in a scan.
    got: The model's intermediates.
    want, weights, rows: The reference's intermediates, attention weights, and
      attention map.
  """

  options: Any
  model: Any
  images: jax.Array
  params: dict
  own: dict
  got: dict
  want: dict
  weights: np.ndarray
  rows: np.ndarray


@functools.cache
def made(case) -> Made:
  options = model_config(**TINY | CASES[case])
  is_hybrid = options.stages is not None
  images = LARGE if is_hybrid else IMAGES
  model = build(options, 5)
  params = _random(_loop_shapes(CASES[case], images))
  own = stack_blocks(params, options) if options.scan else params
  with jax.default_matmul_precision("highest"):
    logits, got = jax.jit(model.apply)({"params": own}, images)
  np.testing.assert_array_equal(logits, got["logits"])
  tokens = got["stem"] if is_hybrid else None
  want = reference.apply(options, params, images, tokens)
  return Made(options, model, images, params, own, got, *want)


def _loop_shapes(parts, images):
  loop = build(model_config(**TINY | parts | dict(scan=False)), 5)
  return tiny.shapes(loop, images.shape)


def _random(shapes):
  """Parameters without zeros; factors and scales of norms are around 1."""
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    mean = float(path[-1].key == "scale")
    return rng.normal(mean, 0.25, leaf.shape).astype("f")

  return jax.tree_util.tree_map_with_path(draw, shapes)


def assert_close(got, want, case):
  """Sums of float32, of values up to some units; bfloat16 has eight bits."""
  rtol = 0.1 if "half the bits" in case else 1e-5
  for path, value in jax.tree_util.tree_leaves_with_path(want):
    other = got
    for key in path:
      other = other[key.key]
    np.testing.assert_allclose(
      np.asarray(other, "d"),
      value,
      rtol=0,
      atol=rtol * np.abs(value).max(),
      err_msg=str(path),
    )


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
cases = pytest.mark.parametrize("case", [*QUICK, *map(slow, SLOW)])


@cases
def test_all_intermediates(case):
  m = made(case)
  of_hybrid = {k for k in m.got if k.startswith(("root", "block"))}
  assert m.got.keys() - of_hybrid == m.want.keys()
  assert_close(m.got, m.want, case)
  # The head is float32, whatever the type of the tokens; so are parameters.
  precise = {*m.want} & {"encoded", "pooled", "pre_logits", "logits"}
  assert {m.got[k].dtype for k in precise} == {np.dtype("f")}
  tokens = m.got["with_posemb"], m.got["encoderblock_1"]["after_mlp"]
  assert {x.dtype for x in tokens} == {jnp.dtype(m.options.dtype)}
  shapes = jax.tree.leaves(tiny.shapes(m.model, m.images.shape))
  assert {x.dtype for x in shapes} == {np.dtype("f")}


@cases
def test_attention(case):
  """The weights of every block, and the map of what the head reads."""
  m = made(case)
  own = m.own, m.images
  weights = inspection.attention_of(m.options, *own)
  assert_close({"w": weights}, {"w": m.weights}, case)
  rows = inspection.attention_map(m.options, *own)
  assert_close({"map": rows}, {"map": m.rows}, case)
  assert np.ptp(rows[0]) > 0.005


@pytest.mark.parametrize(
  "case",
  [
    *("relative", "DINOv3", "positions in blocks"),
    *map(slow, ("plain", "BEiT in a scan", "two class tokens, registers")),
  ],
)
def test_a_part_of_the_tokens(case, monkeypatch):
  """As if no query looked at the others; also computed in chunks."""
  m = made(case)

  def encode(params, *args):
    return m.model.apply({"params": params}, *args, method="encode")[0]

  params = jax.tree.map(np.float64, m.params)
  want, _ = reference.encode(m.options, params, m.want["stem"], KEEP)
  want = {"encoded": want["encoded"]}
  args = m.own, jnp.asarray(m.want["stem"], "f"), None, jnp.asarray(KEEP)
  assert_close({"encoded": jax.jit(encode)(*args)}, want, case)
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=1))
  got = jax.jit(tiny.in_step(encode))(*args)
  assert_close({"encoded": got}, want, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "two class tokens, registers"])
def test_a_survey_is_distances_and_maps(case):
  """Distances are among patches: the weights on other tokens do not count."""
  m = made(case)
  got = inspection.survey(m.options, m.own, m.images)
  assert_close({"map": got.maps}, {"map": m.rows}, case)
  among = m.weights[..., -6:, -6:]
  among = among / among.sum(-1, keepdims=True)
  places = np.array([*np.ndindex(2, 3)])
  apart = 4 * np.linalg.norm(places[:, None] - places, axis=-1)  # pixels
  want = (among * apart).sum(-1).mean(-1)
  assert_close({"far": got.distances}, {"far": want}, case)
  rows = inspection.by_head(m.options, m.own, m.images, (1, 0))
  want = m.weights[..., -3, -6:].reshape(rows.shape)
  assert_close({"rows": rows}, {"rows": want}, case)


@pytest.mark.parametrize("case", ["plain", "positions in blocks", "fixed"])
def test_the_table_of_positions(case):
  """That of the first block, if each has its own."""
  m = made(case)
  table = inspection.position_table(m.options, m.own, (8, 12))
  if case == "positions in blocks":
    block = m.params["Transformer"]["encoderblock_0"]
    want = reference.table_of(block["posembed_input"], (2, 3))
  else:
    want = (m.want["with_posemb"][:, -6:] - m.want["stem"].reshape(2, 6, 16))[0]
  np.testing.assert_allclose(table, want, atol=1e-6)


@pytest.mark.parametrize(
  "case, word",
  [("relative", "offsets"), ("BEiT", "biases"), ("DINOv3", "rotate")],
)
def test_why_there_is_no_table(case, word):
  m = made(case)
  with pytest.raises(ValueError, match=word):
    inspection.position_table(m.options, m.own, (8, 12))


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", ["plain", "no row of the class token", "halves"]
)
def test_images_of_another_size_get_the_resized_table(case):
  """One module serves crops of two sizes, with one table."""
  options = {"halves": dict(posemb="learn2d")} | CASES
  options = model_config(**TINY | options[case])
  model = build(options, 5)
  params = _random(tiny.shapes(model, IMAGES.shape))
  crops = np.random.default_rng(2).uniform(-1, 1, (2, 12, 8, 3)).astype("f")

  def encode(model, images):
    tokens, _ = model.embed(images)
    of_images = LearnedOn((2, 3), "dinov2")
    return tokens, model.encode(tokens, None, table=of_images)[1]

  tokens, out = jax.jit(
    lambda x: model.apply({"params": params}, x, method=encode)
  )(crops)
  tables = params["Transformer"]["posembed_input"]
  table = reference.table_of(tables, (2, 3))[None, -6:].astype("d")
  want = resample_posemb(table, (2, 3), (3, 2), 0, "dinov2")
  added = out["with_posemb"][:, 1:] - tokens.reshape(2, 6, 16)
  np.testing.assert_allclose(added, want.repeat(2, 0), atol=2e-6)


# What changes no number.


@functools.cache
def logits_and_gradients(parts, scan, remat):
  parts = EVERYTHING if parts == "everything" else {}
  options = model_config(**TINY | parts | dict(scan=scan, remat=remat))
  model, params = build(options, 5), _random(_loop_shapes(parts, IMAGES))
  params = stack_blocks(params, options) if scan else params

  def loss(params):
    logits, _ = model.apply({"params": params}, IMAGES, is_training=True)
    return jnp.sum(logits**2), logits

  with jax.default_matmul_precision("highest"):
    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return logits, unstack_blocks(jax.device_get(grads), options)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["none", "everything"])
@pytest.mark.parametrize("scan, remat", [(True, "dots"), (False, "full")])
def test_scan_and_remat_change_no_number(parts, scan, remat):
  logits, grads = logits_and_gradients(parts, scan, remat)
  expected_logits, expected = logits_and_gradients(parts, False, "none")
  # The same sums, maybe in another order: some units of float32 rounding.
  np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=1e-6 * largest
    ),
    grads,
    expected,
  )


def test_without_parts_the_program_is_that_of_the_plain_vit():
  """So the plain one has no operation that a part would need."""
  options = dict(scan=True, dropout=0.1, stochastic_depth=0.1, dtype="bfloat16")

  def program(name):
    model = build(model_config(name, **TINY | dict(depth=1) | options), 5)

    def loss(params, key):
      rngs = {"dropout": key}
      apply = functools.partial(model.apply, is_training=True, rngs=rngs)
      return jnp.sum(apply({"params": params}, IMAGES)[0])

    shapes = tiny.shapes(model, IMAGES.shape)
    lowered = jax.jit(jax.grad(loss)).lower(shapes, jax.random.key(0))
    return lowered.as_text()

  assert program("vit") == program("modern")


# Options that do not fit.


@pytest.mark.parametrize(
  "options, word",
  [
    (dict(pool="tok"), "config.model.pool"),
    (dict(num_heads=3), "divisor"),
    (dict(variant="B/5"), "8 x 12"),
    (dict(posemb="sincos2d", width=18), "width"),
  ],
)
def test_options_that_do_not_fit(options, word):
  with pytest.raises(ValueError, match=word):
    tiny.shapes(build(model_config(**TINY | options), 5), IMAGES.shape)


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
def test_parts_that_do_not_fit(parts, option):
  (error,) = model_config("modern", **TINY | parts).errors()
  assert error.startswith(f"config.model.{option}: got")

"""Attention weights, recomputed; what follows from them, in closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.families import model_config
from vit_jax.families.resnet import BiTConfig
from vit_jax.models import build, inspection
from vit_jax.models.chip_choices import CHOICES, Choices

TINY = dict(variant="B/4", width=16, depth=2, mlp_dim=32, num_heads=2)
IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype("f")
LARGE = IMAGES.repeat(2, 1).repeat(2, 2)
MODELS = {
  "token": dict(ln_eps=0.1, cls_row=False),
  "relative": dict(posemb="relative", pool="gap", remat="full"),
  "shared": dict(posemb="learn2d", posemb_at="shared"),
  "half the bits": dict(dtype="bfloat16", posemb="sincos2d"),
  "hybrid": dict(variant="R+Ti/4", stage_width=0.5),
  "scan, positions in blocks": dict(scan=True, posemb_at="blocks"),
  "rotated": dict(
    name="modern",
    rope="dinov3",
    posemb="none",
    registers=3,
    qkv_bias="none",
    layer_scale=0.5,
    scan=True,
  ),
  "biases of scores": dict(
    name="modern", posemb="relative_bias", qkv_bias="no_key"
  ),
  "rotated neighbours": dict(
    name="modern", rope="eva02", qkv_bias="no_key", mlp="swiglu", distilled=True
  ),
}


def made(images=IMAGES, **options):
  model = build(model_config(**TINY | options), 5)
  return model, tiny.random_params(model, images.shape, 0.3)


def block_of(params, i):
  encoder = params["Transformer"]
  if "encoderblock" in encoder:
    return jax.tree.map(lambda a: a[i], encoder["encoderblock"])
  return encoder[f"encoderblock_{i}"]


def normed(x, norm, eps):
  mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(variance + eps) * norm["scale"] + norm["bias"]


def branch(model, params, weights, out, i):
  """Returns what the weights make of the values of block i, in numpy."""
  options, block = model.options, block_of(params, i)
  before = (
    out[f"encoderblock_{i - 1}"]["after_mlp"] if i else out["with_posemb"]
  )
  x = np.array(before, np.float32)
  if options.posemb_at != "stem":
    shared = options.posemb_at == "shared"
    table = (params["Transformer"] if shared else block)["posembed_input"]
    if "pos_embedding" in table:
      x = x + table["pos_embedding"]
    else:
      columns, rows = (table[f"pos_embedding_{k}"][0] for k in "xy")
      for y in range(2):
        for c in range(3):
          x[:, 1 + 3 * y + c] += np.concatenate([columns[c], rows[y]])
  x = normed(x, block["LayerNorm_0"], options.ln_eps)
  attention = block["MultiHeadDotProductAttention_0"]
  value = np.einsum("bkd,dhe->bkhe", x, attention["value"]["kernel"])
  value = value + attention["value"].get("bias", 0)
  mixed = np.einsum("bhqk,bkhe->bqhe", weights[i], value)
  got = np.einsum("bqhe,hed->bqd", mixed, attention["out"]["kernel"])
  got = got + attention["out"]["bias"]
  return got * block.get("LayerScale_0", {"scale": 1})["scale"]


QUICK = ("scan, positions in blocks",)


@pytest.mark.parametrize(
  "options",
  [
    pytest.param(
      options, marks=() if name in QUICK else pytest.mark.slow, id=name
    )
    for name, options in MODELS.items()
  ],
)
def test_weights_times_values_are_the_branch_of_the_model(options):
  images = LARGE if "stage_width" in options else IMAGES
  model, params = made(images, **options)
  with jax.default_matmul_precision("highest"):
    _, out = jax.jit(model.apply)({"params": params}, images)
    weights = np.asarray(inspection.attention_of(model.options, params, images))
  num_tokens = model.options.num_tokens(images.shape[1:3])
  assert weights.shape == (2, 2, 2, num_tokens, num_tokens)
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
  # bfloat16 has 8 bits, and the branch reaches 8.
  atol = 0.1 if model.options.dtype == "bfloat16" else 2e-5
  for i in range(2):
    got = np.asarray(out[f"encoderblock_{i}"]["attention"], np.float32)
    expected = branch(model, params, weights, out, i)
    assert np.abs(got).max() > 0.1
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.slow
def test_inside_a_step_that_computes_attention_in_chunks(monkeypatch):
  """The efficient programs return no weights; these are the same without."""
  model, params = made()
  images = jnp.asarray(IMAGES)
  attention_of = functools.partial(inspection.attention_of, model.options)
  expected = attention_of(params, images)
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=1))
  got = jax.jit(tiny.in_step(attention_of))(params, images)
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_a_model_without_attention_is_refused():
  options = BiTConfig(variant="R26x0.5", stage_blocks=(1,))
  with pytest.raises(ValueError, match="R26x0.5, which has no attention"):
    inspection.attention_of(options, {"head": {}}, IMAGES)
  with pytest.raises(ValueError, match="no attention"):
    inspection.attention_map(options, {"head": {}}, IMAGES)


# Rollout.


def random_attention(*shape):
  scores = np.random.default_rng(2).normal(size=shape).astype("f")
  return jax.nn.softmax(jnp.asarray(scores), axis=-1)


@pytest.mark.parametrize("layers", [1, 6])
def test_uniform_attention_rolls_out_to_identity_halved_by_each_layer(layers):
  n, share = 7, 0.5**layers
  uniform = jnp.full((layers, 1, 2, n, n), 1 / n)
  expected = share * np.eye(n) + (1 - share) / n
  np.testing.assert_allclose(
    inspection.rollout(uniform)[0], expected, atol=1e-6
  )


def test_the_last_layer_stands_left():
  attention = random_attention(3, 2, 4, 5, 5)
  first, second, third = (np.asarray(a).mean(1) / 2 for a in attention)
  half = np.eye(5) / 2
  expected = (third + half) @ (second + half) @ (first + half)
  got = inspection.rollout(attention)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  np.testing.assert_allclose(got.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(
  "pool",
  ["token", *(pytest.param(p, marks=pytest.mark.slow) for p in ("gap", "map"))],
)
def test_the_map_is_the_row_that_the_head_reads(pool):
  model, params = made(pool=pool)
  rolled = np.asarray(
    inspection.rollout(inspection.attention_of(model.options, params, IMAGES))
  )
  if pool == "token":
    expected = rolled[:, 0, 1:]
  elif pool == "gap":
    expected = rolled.mean(1)
  else:
    _, out = jax.jit(model.apply)({"params": params}, IMAGES)
    attention = params["MAPHead_0"]["MultiHeadDotProductAttention_0"]
    kernel, bias = attention["query"]["kernel"], attention["query"]["bias"]
    query = np.einsum("d,dhe->he", params["MAPHead_0"]["probe"][0, 0], kernel)
    key = np.einsum("bkd,dhe->bkhe", out["encoded"], attention["key"]["kernel"])
    scores = np.einsum(
      "he,bkhe->bhk", query + bias, key + attention["key"]["bias"]
    )
    weights = np.asarray(jax.nn.softmax(scores / 8**0.5)).mean(1)
    expected = np.einsum("bq,bqk->bk", weights, rolled)
  expected = expected / expected.sum(-1, keepdims=True)
  got = inspection.attention_map(model.options, params, IMAGES)
  np.testing.assert_allclose(got, expected.reshape(2, 2, 3), atol=1e-6)
  assert np.ptp(got[0]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "parts",
  [
    dict(distilled=True, registers=1),
    dict(registers=1, pool="gap"),
    dict(registers=1, pool="token_gap"),
    dict(registers=1, pool="map"),
  ],
  ids=lambda p: p.get("pool", "token"),
)
def test_the_map_leaves_out_registers_and_class_tokens(parts):
  model, params = made(name="modern", **parts)
  options = model.options
  weights = inspection.attention_of(options, params, IMAGES)
  rolled = np.asarray(inspection.rollout(weights))
  class_tokens = rolled[:, : 1 + options.distilled].mean(1)
  patches = rolled[:, -6:].mean(1)
  if options.pool == "map":  # a probe that attends to all patches alike
    probe = params["MAPHead_0"]["MultiHeadDotProductAttention_0"]
    probe["key"] = jax.tree.map(np.zeros_like, probe["key"])
  row = {
    "token": class_tokens,
    "gap": patches,
    "map": patches,
    "token_gap": class_tokens + patches,
  }[options.pool][:, -6:]
  expected = row / row.sum(-1, keepdims=True)
  got = inspection.attention_map(options, params, IMAGES)
  np.testing.assert_allclose(got, expected.reshape(2, 2, 3), atol=1e-6)
  survey = inspection.survey(options, params, IMAGES)
  np.testing.assert_allclose(survey.maps, got, atol=1e-6)
  among = np.asarray(weights)[..., -6:, -6:]
  among = among / among.sum(-1, keepdims=True)
  apart = inspection.distances((2, 3), (4, 4))
  np.testing.assert_allclose(
    survey.distances, (among * apart).sum(-1).mean(-1), rtol=1e-5
  )


# Distances.


def mean_of_uniform(rows, columns):
  """Sum of the distances of all offsets, by how often they occur, over n^2."""
  total = sum(
    (rows - abs(y)) * (columns - abs(x)) * (y * y + x * x) ** 0.5
    for y in range(1 - rows, rows)
    for x in range(1 - columns, columns)
  )
  return total / (rows * columns) ** 2


@pytest.mark.parametrize("grid, has_cls", [((2, 5), 1), ((1, 4), 0)])
def test_uniform_attention_has_the_mean_distance_of_the_grid(grid, has_cls):
  n = grid[0] * grid[1] + has_cls
  uniform = jnp.full((2, 3, n, n), 1 / n)  # images, heads
  got = inspection.mean_distance(uniform, grid, (16, 16))
  assert got.shape == (2, 3)
  np.testing.assert_allclose(got, 16 * mean_of_uniform(*grid), rtol=1e-6)
  if grid[0] == 1:  # on a line of n places: (n^2 - 1) / 3n
    np.testing.assert_allclose(got, 16 * 15 / 12, rtol=1e-6)


@pytest.mark.parametrize(
  "y, x, far", [(0, 1, 14), (1, 0, 16), (1, 1, 452**0.5)]
)
def test_one_neighbour_is_a_patch_away(y, x, far):
  """Each patch of 3 x 4 to one (y, x) away, or its mirror at the border."""
  weights = np.zeros((1, 1, 13, 13), "f")
  weights[..., 0] = 0.75  # the class token takes most, and does not count
  for row in range(3):
    for column in range(4):
      to_y = row + y if row + y < 3 else row - y
      to_x = column + x if column + x < 4 else column - x
      weights[0, 0, 1 + 4 * row + column, 1 + 4 * to_y + to_x] = 0.25
  got = inspection.mean_distance(jnp.asarray(weights), (3, 4), (16, 14))
  np.testing.assert_allclose(got, far, rtol=1e-6)


def test_a_patch_that_sees_only_the_class_token_does_not_count():
  weights = np.zeros((1, 1, 3, 3), "f")
  weights[..., 0] = 1
  weights[0, 0, 1] = 0, 0, 1
  got = inspection.mean_distance(jnp.asarray(weights), (1, 2), (8, 8))
  assert got.tolist() == [[8]]


@pytest.mark.slow
def test_a_survey_is_distances_and_maps():
  model, params = made(pool="gap")
  result = inspection.survey(model.options, params, IMAGES)
  weights = inspection.attention_of(model.options, params, IMAGES)
  expected = inspection.mean_distance(weights, (2, 3), (4, 4))
  np.testing.assert_allclose(result.distances, expected, rtol=1e-5)
  np.testing.assert_allclose(
    result.maps,
    inspection.attention_map(model.options, params, IMAGES),
    rtol=1e-5,
  )
  rows = inspection.by_head(model.options, params, IMAGES, (1, 0))
  np.testing.assert_array_equal(rows.reshape(2, 2, 2, 6), weights[..., 3, :])


@pytest.mark.parametrize(
  "variant, side, rows",
  [("B/16", 224, 16), ("B/16", 384, 12), ("H/14", 518, 1)],
)
def test_fewer_images_at_once_of_more_tokens(variant, side, rows):
  config = model_config(variant=variant)
  assert inspection.batch_size(config, (side, side)) == rows


# Positions.


def _added(model, params):
  _, out = model.apply({"params": params}, jnp.asarray(IMAGES))
  return out["with_posemb"][:, -6:] - out["stem"].reshape(2, 6, 16)


@pytest.mark.slow
def test_positions_are_those_that_the_model_adds():
  for options in (
    dict(cls_row=False),
    dict(posemb="learn2d"),
    dict(pool="gap", posemb="sincos2d"),
  ):
    model, params = made(**options)
    added = jax.jit(functools.partial(_added, model))(params)
    table = inspection.position_table(model.options, params, (8, 12))
    np.testing.assert_allclose(added[0], table, atol=1e-6)


def test_positions_in_blocks_are_of_the_first_block():
  model, params = made(posemb_at="blocks", scan=True)
  stacked = params["Transformer"]["encoderblock"]["posembed_input"]
  np.testing.assert_array_equal(
    inspection.position_table(model.options, params, (8, 12)),
    stacked["pos_embedding"][0, 0, 1:],
  )


@pytest.mark.parametrize(
  "options, word",
  [
    (dict(posemb="relative"), "offsets"),
    (dict(posemb="none"), "no positions"),
    (dict(name="modern", posemb="relative_bias"), "biases"),
    (dict(name="modern", posemb="none", rope="dinov3"), "rotate"),
  ],
)
def test_why_there_is_no_table(options, word):
  model, params = made(**options)
  with pytest.raises(ValueError, match=word):
    inspection.position_table(model.options, params, (8, 12))

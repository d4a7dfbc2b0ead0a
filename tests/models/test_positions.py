"""Position embeddings inside the model: tables, halves, offsets, class row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import ViT

from vit_jax.families.vit import ViTConfig
from vit_jax.models.attention import dot_product_attention
from vit_jax.models.posemb import LearnedOn
from vit_jax.models.resample import resample_posemb
from vit_jax.models.stacking import stack_blocks

TINY = dict(num_classes=5, patch=4, width=16, depth=2, mlp_dim=32, num_heads=2)
IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype("f")


random_params = functools.partial(tiny.random_params, images=IMAGES.shape)


def run(model, params):
  return jax.jit(model.apply)({"params": params}, IMAGES)


def test_halves_are_columns_and_rows():
  model = ViT(**TINY, posemb="learn2d")
  params = random_params(model)
  tables = params["Transformer"]["posembed_input"]
  of_x, of_y = tables["pos_embedding_x"][0], tables["pos_embedding_y"][0]
  assert of_x.shape == (3, 8) and of_y.shape == (2, 8)
  _, out = run(model, params)
  stem = np.asarray(out["stem"])
  added = np.asarray(out["with_posemb"])
  np.testing.assert_array_equal(
    added[:, 0], np.broadcast_to(params["cls"][0], (2, 16))
  )
  added = added[:, 1:].reshape(stem.shape) - stem
  for y in range(2):
    for x in range(3):
      np.testing.assert_allclose(
        added[0, y, x], np.concatenate([of_x[x], of_y[y]]), atol=5e-7
      )


def test_a_table_without_a_row_is_one_with_a_row_of_zeros():
  without = ViT(**TINY, cls_row=False)
  params = random_params(without)
  table = params["Transformer"]["posembed_input"]["pos_embedding"]
  assert table.shape == (1, 6, 16)
  expected = run(without, params)[0]
  params["Transformer"]["posembed_input"] = {
    "pos_embedding": np.pad(table, ((0, 0), (1, 0), (0, 0)))
  }
  np.testing.assert_array_equal(run(ViT(**TINY), params)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("posemb", ["learn", "learn2d"])
def test_images_of_another_size_get_the_resized_table(posemb):
  """One module serves crops of two sizes, with one table."""
  model = ViT(**TINY, posemb=posemb)
  params = random_params(model)
  crops = np.random.default_rng(2).uniform(-1, 1, (2, 12, 8, 3)).astype("f")
  of_images = LearnedOn((2, 3), "dinov2")

  def encode(model, images):
    tokens, _ = model.embed(images)
    return tokens, model.encode(tokens, None, table=of_images)[1]

  apply = jax.jit(lambda x: model.apply({"params": params}, x, method=encode))
  of_table = run(model, params)[1]["encoded"]
  np.testing.assert_array_equal(apply(IMAGES)[1]["encoded"], of_table)
  tables = params["Transformer"]["posembed_input"]
  if posemb == "learn":
    table = tables["pos_embedding"]
  else:
    x, y = tables["pos_embedding_x"][0], tables["pos_embedding_y"][0]
    halves = [np.concatenate([x[j], y[i]]) for i in range(2) for j in range(3)]
    table = np.pad(np.stack(halves)[None], ((0, 0), (1, 0), (0, 0)))
  want = resample_posemb(np.float64(table), (2, 3), (3, 2), 1, "dinov2")
  tokens, out = apply(crops)
  added = out["with_posemb"][:, 1:] - tokens.reshape(2, 6, 16)
  np.testing.assert_allclose(added, want[:, 1:].repeat(2, 0), atol=1e-6)


def test_offsets_are_keys_of_their_own():
  """Compares with a loop over queries and keys, in float64."""
  rng = np.random.default_rng(0)
  n, h, d = 5, 3, 4
  q, k, v = rng.normal(size=(3, 2, n, h, d)).astype("f")
  offsets = rng.normal(size=(2 * n - 1, h, d)).astype("f")
  scores = np.zeros((2, h, n, n))
  for i in range(n):
    for j in range(n):
      keys = k[:, j].astype(float) + offsets[j - i + n - 1]
      scores[:, :, i, j] = np.sum(q[:, i] * keys, -1) / np.sqrt(d)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum("bhij,bjhd->bihd", weights, v)
  got = dot_product_attention(*map(jnp.asarray, (q, k, v, offsets)))
  np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    dict(posemb="relative"),
    dict(posemb="learn2d", posemb_at="blocks", remat="full"),
  ],
)
def test_a_scan_has_the_same_positions(options):
  loop = ViT(**TINY, **options)
  params = random_params(loop)
  scan = ViT(**TINY, **options, scan=True)
  np.testing.assert_allclose(
    run(loop, params)[0],
    run(scan, stack_blocks(params, ViTConfig))[0],
    atol=1e-6,
  )


@pytest.mark.slow
def test_positions_are_added_to_what_each_block_gets():
  """Blocks whose branches are zero return the sum of their tables."""
  model = ViT(**TINY, cls_row=False, posemb_at="blocks")
  params = random_params(model)
  tables = []
  for name in ("encoderblock_0", "encoderblock_1"):
    block = params["Transformer"][name]
    for branch in (
      block["MultiHeadDotProductAttention_0"]["out"],
      block["MlpBlock_0"]["Dense_1"],
    ):
      branch |= {k: np.zeros_like(v) for k, v in branch.items()}
    tables.append(block["posembed_input"]["pos_embedding"][0])
  out = run(model, params)[1]
  before, after = out["with_posemb"], out["encoderblock_1"]["after_mlp"]
  added = np.asarray(after - before)[:, 1:]
  for of_image in added:
    np.testing.assert_allclose(of_image, sum(tables), atol=5e-7)

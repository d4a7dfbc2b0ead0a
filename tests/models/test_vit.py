"""The Vision Transformer: counts, names, initial values, equalities."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict
from tiny import ViT

from vit_jax.config import model_config
from vit_jax.families.vit import ViTConfig
from vit_jax.models.encoder import remat_policy
from vit_jax.models.stacking import stack_blocks, unstack_blocks

TINY = dict(num_classes=5, patch=4, width=16, depth=3, mlp_dim=32, num_heads=2)
IMAGES = jnp.asarray(
  np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)), "float32"
)


shapes = functools.partial(tiny.shapes, images=IMAGES.shape)
random_params = functools.partial(tiny.random_params, images=IMAGES.shape)


@functools.cache
def tiny_params():
  return random_params(ViT(**TINY))


def run(model, params, images=IMAGES):
  """Logits and intermediates."""
  return jax.jit(model.apply)({"params": params}, images)


def count(tree):
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
  "pool, n, scan", [("token", 7, False), ("gap", 6, True), ("map", 6, False)]
)
def test_every_intermediate_has_its_name(pool, n, scan):
  model = ViT(**TINY, pool=pool, scan=scan)
  _, out = jax.eval_shape(model.apply, {"params": shapes(model)}, IMAGES)
  tokens = (2, n, 16)
  branches = ("attention", "after_attention", "mlp", "after_mlp")
  assert jax.tree.map(lambda a: a.shape, out) == {
    "stem": (2, 2, 3, 16),
    "with_posemb": tokens,
    **{f"encoderblock_{i}": dict.fromkeys(branches, tokens) for i in range(3)},
    "encoded": tokens,
    "pooled": (2, 16),
    "pre_logits": (2, 16),
    "logits": (2, 5),
  }


def test_intermediates_are_what_they_are_called():
  model, params = ViT(**TINY), tiny_params()
  logits, out = run(model, params)
  table = params["Transformer"]["posembed_input"]["pos_embedding"]
  np.testing.assert_allclose(  # raster order: row by row of the grid
    out["with_posemb"][:, 1:],
    out["stem"].reshape(2, 6, 16) + table[:, 1:],
    rtol=1e-6,
  )
  cls = np.broadcast_to(params["cls"][:, 0] + table[:, 0], (2, 16))
  np.testing.assert_allclose(out["with_posemb"][:, 0], cls, rtol=1e-6)
  before = out["with_posemb"]
  for i in range(3):
    block = out[f"encoderblock_{i}"]
    np.testing.assert_array_equal(
      block["after_attention"], before + block["attention"]
    )
    before = block["after_mlp"]
    np.testing.assert_array_equal(
      before, block["after_attention"] + block["mlp"]
    )
  np.testing.assert_array_equal(out["pooled"], out["encoded"][:, 0])
  np.testing.assert_array_equal(out["pre_logits"], out["pooled"])
  np.testing.assert_array_equal(out["logits"], logits)


@pytest.mark.slow
def test_without_positions_the_order_of_patches_is_nothing():
  model = ViT(**TINY, pool="gap", posemb="none")
  params = random_params(model)
  logits, _ = run(model, params)
  swapped = jnp.concatenate([IMAGES[:, 4:], IMAGES[:, :4]], axis=1)
  got, _ = run(model, params, swapped)
  # Sums over tokens in another order: float32 rounding of values near 1.
  np.testing.assert_allclose(got, logits, atol=5e-6)


@pytest.mark.slow
def test_initial_values():
  model = ViT(
    num_classes=10,
    patch=8,
    width=128,
    depth=1,
    mlp_dim=256,
    num_heads=4,
    pre_logits=True,
    head_bias=-10.0,
  )
  init = jax.jit(model.init)
  params = init(jax.random.key(0), jnp.zeros((1, 64, 64, 3)))["params"]
  flat = {
    k.rsplit("encoderblock_0/")[-1]: np.asarray(v)
    for k, v in flatten_dict(params, sep="/").items()
  }
  attention = "MultiHeadDotProductAttention_0/"
  for name in (
    *("cls", "head/kernel", "embedding/bias", "pre_logits/bias"),
    *(f"{attention}{n}/bias" for n in ("query", "key", "value", "out")),
  ):
    assert not flat[name].any(), name
  assert (flat["head/bias"] == -10).all()
  stds = {
    "Transformer/posembed_input/pos_embedding": 0.02,
    # lecun_normal: 1 / sqrt(inputs).
    "embedding/kernel": (8 * 8 * 3) ** -0.5,
    "pre_logits/kernel": 128**-0.5,
    # xavier_uniform: sqrt(2 / (inputs + outputs)), of the flattened matrix.
    attention + "query/kernel": 128**-0.5,
    attention + "out/kernel": 128**-0.5,
    "MlpBlock_0/Dense_0/kernel": (2 / (128 + 256)) ** 0.5,
    "MlpBlock_0/Dense_1/kernel": (2 / (128 + 256)) ** 0.5,
    "MlpBlock_0/Dense_0/bias": 1e-6,
  }
  for name, std in stds.items():
    # The spread of n normal draws is known to 1 / sqrt(2 n): 4 of these.
    tolerance = 4 / (2 * flat[name].size) ** 0.5
    assert np.std(flat[name]) == pytest.approx(std, rel=tolerance), name
  bound = (6 / (128 + 128)) ** 0.5
  assert 0.98 * bound < np.abs(flat[attention + "query/kernel"]).max() <= bound


@functools.cache
def logits_and_gradients(scan, remat):
  model = ViT(**TINY | dict(depth=2), scan=scan, remat=remat)
  params = random_params(ViT(**TINY | dict(depth=2)))
  params = stack_blocks(params, ViTConfig) if scan else params

  def loss(params):
    logits, _ = model.apply({"params": params}, IMAGES, is_training=True)
    return jnp.sum(logits**2), logits

  grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return np.asarray(logits), unstack_blocks(jax.device_get(grads), ViTConfig)


@pytest.mark.slow
@pytest.mark.parametrize("scan, remat", [(True, "dots"), (False, "full")])
def test_scan_and_remat_change_no_number(scan, remat):
  logits, grads = logits_and_gradients(scan, remat)
  expected_logits, expected = logits_and_gradients(False, "none")
  # The same sums, maybe in another order: some units of float32 rounding.
  np.testing.assert_allclose(logits, expected_logits, rtol=2e-6, atol=2e-6)
  got, expected = (flatten_dict(g, sep="/") for g in (grads, expected))
  assert got.keys() == expected.keys()
  largest = max(np.abs(v).max() for v in expected.values())
  for path in expected:
    np.testing.assert_allclose(
      got[path], expected[path], rtol=1e-5, atol=1e-6 * largest, err_msg=path
    )


def saved(**options):
  """What the forward pass of 16 images, 65 tokens each, keeps: abstract."""
  model = ViT(**TINY | dict(depth=4), **options)
  images = jnp.zeros((16, 32, 32, 3))

  def backward(params):
    return jax.vjp(lambda p: model.apply({"params": p}, images)[0], params)[1]

  # A backward pass is a tree whose leaves are what it has saved.
  return jax.eval_shape(backward, tiny.shapes(model, images.shape))


@pytest.mark.slow
@pytest.mark.parametrize("scan, share", [(False, 0.6), (True, 1)])
def test_remat_keeps_less_for_the_backward_pass(scan, share):
  none, dots, full = (
    count(saved(scan=scan, remat=r)) for r in ("none", "dots", "full")
  )
  # Of blocks in a scan "none" keeps little more than "dots" already.
  assert full < 0.6 * dots < 0.6 * share * none


def test_a_scan_keeps_results_of_products_and_sums_of_norms():
  of_blocks = [
    x.shape
    for x in jax.tree.leaves(saved(scan=True))
    if x.shape[:2] == (4, 16) and 65 in x.shape
  ]
  width, mlp_dim, num_heads = 16, 32, 2
  # x, query, key, value, attended, after_attention; hidden; two sums of each
  # norm; and here, outside of a step, attention's sum of every head.
  of_token = 6 * width + mlp_dim + 2 * 2 + num_heads
  assert sum(map(math.prod, of_blocks)) == 4 * 16 * 65 * of_token


def test_a_scan_keeps_what_cudnn_returns():
  """Else every block of it ran again in the backward pass on a GPU."""
  # jax offers no public way to this primitive on a machine without a GPU.
  from jax._src.cudnn import fused_attention_stablehlo as fused

  policy = remat_policy(model_config(variant="B/16", scan=True))
  assert policy(fused._dot_product_attention_fwd_p_wrapper)
  assert not policy(jax.lax.exp_p)


def test_stacking_is_undone_and_leaves_numpy_numpy():
  params = tiny_params()
  stacked = stack_blocks(params, ViTConfig)
  kernel = stacked["Transformer"]["encoderblock"]["MlpBlock_0"]["Dense_0"]
  assert isinstance(kernel["kernel"], np.ndarray)
  assert kernel["kernel"].shape == (3, 16, 32)
  assert stack_blocks(stacked, ViTConfig) is stacked
  assert unstack_blocks(params, ViTConfig) is params
  jax.tree.map(
    np.testing.assert_array_equal, unstack_blocks(stacked, ViTConfig), params
  )
  expected = shapes(ViT(**TINY, scan=True))
  assert jax.tree.map(np.shape, stacked) == jax.tree.map(
    lambda a: a.shape, expected
  )


@pytest.mark.parametrize(
  "options, word",
  [
    (dict(pool="tok"), "config.model.pool"),
    (dict(num_heads=3), "divisor"),
    (dict(patch=5), "8 x 12"),
    (dict(posemb="sincos2d", width=18), "width"),
  ],
)
def test_options_that_do_not_fit(options, word):
  with pytest.raises(ValueError, match=word):
    shapes(ViT(**TINY | options))

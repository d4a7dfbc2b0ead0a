"""Initial values, what a backward pass keeps, and stacked blocks."""

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
from vit_jax.models import build
from vit_jax.models.encoder import remat_policy
from vit_jax.models.stacking import stack_blocks, unstack_blocks

TINY = dict(num_classes=5, patch=4, width=16, depth=3, mlp_dim=32, num_heads=2)


def assert_spread(x, std):
  # The spread of n normal draws is known to 1 / sqrt(2 n): 4 of these.
  assert np.std(x) == pytest.approx(std, rel=4 / (2 * x.size) ** 0.5)


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
    assert_spread(flat[name], std)
  bound = (6 / (128 + 128)) ** 0.5
  assert 0.98 * bound < np.abs(flat[attention + "query/kernel"]).max() <= bound


def test_initial_values_of_later_parts():
  sizes = dict(variant="B/4", width=128, depth=1, mlp_dim=8, num_heads=2)
  sizes |= dict(layer_scale=1e-5, registers=64)
  projected, distilled = (
    build(model_config("modern", **sizes, **parts), 5)
    for parts in (dict(projection=256), dict(distilled=True))
  )

  @jax.jit
  def params(key):  # what is not returned is not computed
    a, b = (
      model.init(key, jnp.zeros((1, 16, 24, 3)))["params"]
      for model in (projected, distilled)
    )
    block = a["Transformer"]["encoderblock_0"]
    scales = [block[f"LayerScale_{k}"]["scale"] for k in (0, 1)]
    zeros = [a["cls"], *(b[k]["kernel"] for k in ("head", "head_dist"))]
    return scales, zeros, a["registers"], a["projection"]["kernel"], b["dist"]

  scales, zeros, registers, projection, dist = params(jax.random.key(0))
  assert all((x == np.float32(1e-5)).all() for x in scales)
  assert not any(x.any() for x in zeros)
  assert_spread(registers, 0.02)
  assert_spread(projection, 128**-0.5)
  assert_spread(dist, 0.02)


def saved(**options):
  """What the forward pass of 16 images, 65 tokens each, keeps: abstract."""
  model = ViT(**TINY | dict(depth=4), **options)
  images = jnp.zeros((16, 32, 32, 3))

  def backward(params):
    return jax.vjp(lambda p: model.apply({"params": p}, images)[0], params)[1]

  # A backward pass is a tree whose leaves are what it has saved.
  tree = jax.eval_shape(backward, tiny.shapes(model, images.shape))
  return [x.shape for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("scan, share", [(False, 0.6), (True, 1)])
def test_remat_keeps_less_for_the_backward_pass(scan, share):
  none, dots, full = (
    sum(map(math.prod, saved(scan=scan, remat=remat)))
    for remat in ("none", "dots", "full")
  )
  # Of blocks in a scan "none" keeps little more than "dots" already.
  assert full < 0.6 * dots < 0.6 * share * none


def test_a_scan_keeps_results_of_products_and_sums_of_norms():
  of_blocks = [x for x in saved(scan=True) if x[:2] == (4, 16) and 65 in x]
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
  params = tiny.random_params(ViT(**TINY))
  stacked = stack_blocks(params, ViTConfig)
  kernel = stacked["Transformer"]["encoderblock"]["MlpBlock_0"]["Dense_0"]
  assert isinstance(kernel["kernel"], np.ndarray)
  assert stack_blocks(stacked, ViTConfig) is stacked
  assert unstack_blocks(params, ViTConfig) is params
  jax.tree.map(
    np.testing.assert_array_equal, unstack_blocks(stacked, ViTConfig), params
  )
  want = tiny.shapes(ViT(**TINY, scan=True))
  assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, want)

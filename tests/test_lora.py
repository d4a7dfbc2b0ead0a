"""Adapters: the start, the products, the merge, the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict, unflatten_dict
from steps import MESH, ONE, assert_losses_are_close, by_path, drawn, placed

from vit_jax.batch import normalise
from vit_jax.config import LoRAConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import lora
from vit_jax.models import build
from vit_jax.models.stacking import unstack_blocks

ALL = ("query", "key", "value", "out", "Dense_0", "Dense_1")
SMALL = dict(model__depth=1)
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets=ALL)
MODERN = dict(
  model__name="modern",
  model__mlp="swiglu",
  model__rope="dinov3",
  model__posemb="none",
  model__registers=2,
  model__layer_scale=0.1,
  model__qkv_bias="no_key",
  lora__targets=(*ALL, "Gate"),
)


def _flat(tree):
  return flatten_dict(tree, sep="/")


@pytest.mark.parametrize(
  "options",
  [
    SMALL,
    pytest.param({**MODERN, "model__scan": True}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_it_starts_as_its_base_and_is_merged_exactly(options):
  parts = tiny.Parts(tiny.config(**{**LORA, **options}), ONE)
  images = jnp.asarray(tiny.batch(0, parts.config)["image"])
  predict = jax.jit(lambda p: parts.trainer.predict(p, images))
  module = build(parts.config.model.for_inference(), tiny.NUM_CLASSES)
  apply = jax.jit(lambda p: module.apply({"params": p}, normalise(images)))

  def plain(params):
    return unstack_blocks(jax.device_get(params), ViTConfig)

  flat = _flat(drawn(parts.shapes.params))
  flat |= {k: 0 * v for k, v in flat.items() if k.endswith("lora_b")}
  start = placed(parts, unflatten_dict(flat, sep="/"))
  np.testing.assert_allclose(  # zero factors add zeros
    predict(start.eval_params)[1]["pre_logits"],
    apply(plain(lora.without_factors(start.model_params)))[1]["pre_logits"],
    rtol=1e-5,
    atol=1e-5,
  )
  before = jax.device_get(start.fixed["base"])
  state, metrics = parts.run(3, start)
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  jax.tree.map(np.testing.assert_array_equal, state.fixed["base"], before)
  trained = _flat(state.params)
  kinds = {k.rpartition("/")[2] for k in trained if "head" not in k}
  assert kinds == {"lora_a", "lora_b"}
  assert all(np.any(v) for k, v in trained.items() if k.endswith("lora_b"))

  flat = _flat(plain(state.model_params))
  base = {k: v for k, v in flat.items() if "lora" not in k}
  merged = dict(base)
  for name in [k for k in flat if k.endswith("lora_a")]:
    path = name.removesuffix("/lora_a")
    a, b, kernel = flat[name], flat[f"{path}/lora_b"], flat[f"{path}/kernel"]
    merged[f"{path}/kernel"] = lora.merged(kernel, a, b, scale=6 / 2)
  logits = lambda flat: apply(unflatten_dict(flat, sep="/"))[0]
  want = predict(state.eval_params)[0]
  np.testing.assert_allclose(logits(merged), want, rtol=1e-5, atol=1e-5)
  assert np.abs(logits(base) - want).max() > 1e-3


@pytest.mark.slow
def test_on_a_mesh_in_microbatches():
  """Sums of eight devices in another order; the factors are split."""
  changes = {**LORA, "optim__microbatch": 1, "model__scan": True}
  one = tiny.Parts(tiny.config(**changes), ONE)
  many = tiny.Parts(tiny.config(**changes, **MESH))
  runs = [parts.run(3, placed(parts))[1] for parts in (one, many)]
  assert_losses_are_close(*runs)
  shapes = _flat(many.shapes.params)
  factors = {k: v for k, v in shapes.items() if "/lora_" in k}
  for name, x in factors.items():
    part = x.sharding.shard_shape(x.shape)
    assert part[0] == x.shape[0] and np.prod(part) < np.prod(x.shape), name
  moments = {k: x for k, x in by_path(many.shapes.opt_state).items() if x.ndim}
  assert len(moments) == 2 * len(shapes)
  for path, x in moments.items():
    (owner,) = (k for k in shapes if path.endswith(k))
    assert x.sharding == shapes[owner].sharding, path


def test_the_step_forms_no_product_of_factors_and_no_gradient_of_the_base():
  """Nothing of a kernel's shape, whose rows are a matrix in a step on a CPU."""

  def products(**options):
    parts = tiny.Parts(tiny.config(**SMALL, model__scan=True, **options), ONE)
    batch = tiny.batch(0, parts.config)
    jaxpr = jax.make_jaxpr(parts.train_step)(parts.shapes, batch)
    return {
      equation.outvars[0].aval.shape
      for equation, _ in tiny.equations(jaxpr)
      if equation.primitive.name == "dot_general"
    }

  kernels = {(32, 4, 8), (4, 8, 32), (32, 32), (32, 64), (64, 32)}
  assert not products(**LORA) & kernels
  assert products() & kernels  # what is looked for


@pytest.mark.parametrize(
  "options, word",
  [
    (dict(lora__targets=("query", "Gate")), "got query, Gate, expected"),
    (tiny.RESNET, r"lora\.rank: got 2, .*BiTConfig\.BLOCKS"),
  ],
)
def test_an_option_without_effect_is_an_error(options, word):
  with pytest.raises(ValueError, match=word):
    tiny.Parts(tiny.config(lora__rank=2, **options), ONE)


def test_factors_start_as_in_pytorch():
  """Uniform within 1 / sqrt(inputs), whose deviation is 1 / sqrt(3 inputs)."""
  path = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/"
  kernels = {
    f"{path}query/kernel": np.zeros((64, 4, 16)),
    f"{path}out/kernel": np.zeros((4, 16, 64)),
    "Transformer/encoderblock_0/MlpBlock_0/Dense_1/kernel": np.zeros((256, 64)),
  }
  options = LoRAConfig(rank=64, targets=("query", "out", "Dense_1"))
  head = {"head": {"bias": np.zeros(2)}}
  trained, base = lora.split(
    unflatten_dict(kernels, sep="/") | head,
    options,
    jax.random.key(0),
    ViTConfig(),
  )
  assert _flat(base).keys() == kernels.keys()
  del trained["head"]
  for name, x in _flat(trained).items():
    if name.endswith("lora_b"):
      assert not np.any(x), name
      continue
    bound = np.prod(x.shape[:-1]) ** -0.5
    assert 0.98 * bound < np.abs(x).max() <= bound, name
    # 4,096 draws or more: their deviation is off by 1 % in the mean.
    np.testing.assert_allclose(np.std(x), bound / 3**0.5, rtol=0.03)

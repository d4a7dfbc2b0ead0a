"""Adapters: the start, the products, the merge, the mesh."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import param_groups
from vit_jax.batch import normalise
from vit_jax.config import LoRAConfig
from vit_jax.config.checks import errors as config_errors
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import lora
from vit_jax.models import build
from vit_jax.models.stacking import unstack_blocks

ONE = jax.devices()[:1]
ALL = ("query", "key", "value", "out", "Dense_0", "Dense_1")
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


def test_examples():
  assert doctest.testmod(lora).failed == 0


@pytest.mark.parametrize(
  "options",
  [
    {},
    pytest.param(
      {"model__scan": True, "model__remat": "full"}, marks=pytest.mark.slow
    ),
    pytest.param(MODERN, marks=pytest.mark.slow),
    pytest.param({**MODERN, "model__scan": True}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_it_starts_as_its_base_and_is_merged_exactly(options):
  parts = tiny.Parts(tiny.config(**{**LORA, **options}), ONE)
  start = parts.state()
  batch = jnp.asarray(tiny.batch(0, parts.config)["image"])
  plain = build(parts.config.model, tiny.NUM_CLASSES)
  base = lora.without_factors(start.model_params)
  # Zero factors add zeros.
  np.testing.assert_array_equal(
    parts.trainer.predict(start.eval_params, batch)[1]["pre_logits"],
    plain.apply({"params": base}, normalise(batch))[1]["pre_logits"],
  )
  before = jax.device_get(start.fixed["base"])
  state, metrics = parts.run(3, start)
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  jax.tree.map(np.testing.assert_array_equal, state.fixed["base"], before)
  trained = _flat(state.params)
  kinds = {k.rpartition("/")[2] for k in trained if "head" not in k}
  assert kinds == {"lora_a", "lora_b"}
  assert all(np.any(v) for k, v in trained.items() if k.endswith("lora_b"))

  flat = _flat(unstack_blocks(jax.device_get(state.model_params), ViTConfig))
  merged = {k: v for k, v in flat.items() if "lora" not in k}
  for name in [k for k in flat if k.endswith("lora_a")]:
    path = name.removesuffix("/lora_a")
    a, b, kernel = flat[name], flat[f"{path}/lora_b"], flat[f"{path}/kernel"]
    merged[f"{path}/kernel"] = lora.merged(kernel, a, b, scale=6 / 2)
  module = build(parts.config.model.for_inference(), tiny.NUM_CLASSES)
  got, _ = module.apply(
    {"params": unflatten_dict(merged, sep="/")}, normalise(batch)
  )
  want, _ = parts.trainer.predict(state.eval_params, batch)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  unmerged = module.apply(
    {
      "params": unstack_blocks(
        jax.device_get(lora.without_factors(state.model_params)), ViTConfig
      )
    },
    normalise(batch),
  )[0]
  assert np.abs(unmerged - want).max() > 1e-3


@pytest.mark.slow
def test_on_a_mesh_in_microbatches():
  """Sums of eight devices in another order; the factors are split."""
  changes = {**LORA, "optim__microbatch": 1, "model__scan": True}
  one = tiny.Parts(tiny.config(**changes), ONE)
  mesh = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
  many = tiny.Parts(tiny.config(**changes, **mesh))
  losses = lambda parts: [m["loss"] for m in parts.run(3)[1]]
  np.testing.assert_allclose(losses(many), losses(one), rtol=1e-5)
  shapes = _flat(many.shapes.params)
  factors = {k: v for k, v in shapes.items() if "/lora_" in k}
  for name, x in factors.items():
    part = x.sharding.shard_shape(x.shape)
    assert part[0] == x.shape[0] and np.prod(part) < np.prod(x.shape), name
  moments = [
    (param_groups.path_of(path), x)
    for path, x in jax.tree_util.tree_leaves_with_path(many.shapes.opt_state)
    if x.ndim
  ]
  assert len(moments) == 2 * len(shapes)
  for path, x in moments:
    (owner,) = (k for k in shapes if path.endswith(k))
    assert x.sharding == shapes[owner].sharding, path


@pytest.mark.parametrize("scan", [False, True])
def test_the_step_forms_no_product_of_factors_and_no_gradient_of_the_base(scan):
  """Per token and map: the forward pass, the gradient of the inputs, and for
  the factors three times their size each; nothing of a kernel's shape."""
  parts = tiny.Parts(tiny.config(model__scan=scan, **LORA), ONE)
  batch = tiny.batch(0, parts.config)
  jaxpr = jax.make_jaxpr(parts.train_step)(parts.shapes, batch)
  results = [
    equation.outvars[0].aval.shape
    for equation, _ in tiny.equations(jaxpr)
    if equation.primitive.name == "dot_general"
  ]
  kernels = {
    x.shape[int(scan) :]
    for name, x in _flat(parts.shapes.fixed["base"]).items()
    if name.endswith("kernel") and "block" in name
  }
  # by_rows multiplies matrices.
  matrices = {(32, 32), (32, 64), (64, 32)}
  sizes = {int(np.prod(k)) for k in kernels}
  assert sizes == {32 * 32, 32 * 64}
  assert not {*results} & (kernels | matrices)
  full = tiny.Parts(tiny.config(model__scan=scan), ONE)
  products = [
    equation.outvars[0].aval.shape
    for equation, _ in tiny.equations(
      jax.make_jaxpr(full.train_step)(full.shapes, batch)
    )
    if equation.primitive.name == "dot_general"
  ]
  assert {*products} & (kernels | matrices)  # what is looked for


def test_an_option_without_effect_is_an_error():
  config = tiny.config(lora__rank=2, lora__targets=("query", "Gate"))
  with pytest.raises(ValueError, match="got query, Gate, expected some of"):
    tiny.Parts(config, ONE)
  resnet = tiny.config(lora__rank=2, **tiny.RESNET)
  with pytest.raises(
    ValueError, match="lora.rank: got 2, expected 0, as BiTConfig.BLOCKS"
  ):
    tiny.Parts(resnet, ONE)
  errors = config_errors(tiny.config(lora__rank=-1, lora__alpha=0.0))
  assert [e.split(":")[0] for e in errors] == [
    "config.lora.rank",
    "config.lora.alpha",
  ]


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

"""ResNets: norms in closed form, shapes, names, and what the options do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.config import model_config
from vit_jax.families import resnet as family
from vit_jax.families.resnet import Norms
from vit_jax.models import build
from vit_jax.models.resnet import standardise

SMALL = dict(num_classes=3, blocks=(1, 2))
IMAGES = jnp.asarray(
  np.random.default_rng(0).uniform(-1, 1, (2, 40, 24, 3)), "float32"
)


def ResNet(num_classes, blocks, form="v2", **options):
  """The linen module with these options of its family."""
  cls = {"v1": family.BiTV1Config, "v2": family.BiTConfig}[form]
  model = cls(stage_blocks=blocks, stage_width=0.5, **options)
  return build(model, num_classes)


@functools.cache
def random_params(form):
  """Parameters without zeros, unlike the initial ones."""
  return tiny.random_params(ResNet(**SMALL, form=form), IMAGES.shape, 0.3)


def run(model, params, images=IMAGES):
  return jax.jit(model.apply)({"params": params}, images)


@pytest.mark.parametrize("on", ["var", "std"])
def test_standardised_kernels(on):
  kernel = np.random.default_rng(0).normal(3, 2, (3, 3, 5, 4)).astype("f")
  eps = 0.5
  got = standardise(jnp.asarray(kernel), Norms(1.0, eps, on))
  flat = kernel.reshape(-1, 4)
  divisor = np.sqrt(flat.var(0) + eps) if on == "var" else flat.std(0) + eps
  expected = (flat - flat.mean(0)) / divisor
  np.testing.assert_allclose(got.reshape(-1, 4), expected, atol=2e-6)


@pytest.mark.parametrize(
  "name, size", [("bit", (33, 65)), ("bit", (7, 1)), ("bit_v1", (40, 24))]
)
def test_maps_have_the_sizes_that_geometry_says(name, size):
  model = model_config(
    name=name, variant="R26x1", stage_blocks=(1, 2, 1), stage_width=0.5
  )
  images = jax.ShapeDtypeStruct((2, *size, 3), "float32")
  (logits, out), _ = jax.eval_shape(
    build(model, 3).init_with_output, jax.random.key(0), images
  )
  assert logits.shape == (2, 3)
  assert out["block3"].shape[1:3] == model.grid(size)
  assert out["encoded"].shape == (2, *model.grid(size), 512)
  assert out["root"].shape[-1] == 32 and out["block1"].shape[-1] == 128
  assert out["pre_logits"].shape == (2, 512)


@pytest.mark.slow
def test_a_fresh_unit_of_v1_passes_its_input_on():
  """The last norm of a unit starts at zero, and the head at zero."""
  model = ResNet(**SMALL, form="v1", head_bias=-2.0)
  params = jax.jit(model.init)(jax.random.key(0), IMAGES)["params"]
  logits, out = run(model, params)
  np.testing.assert_array_equal(logits, -2.0)
  unit = params["block2"]["unit2"]
  assert not unit["gn3"]["scale"].any() and unit["gn2"]["scale"].all()
  only_first = params | {"block2": params["block2"] | {"unit2": unit}}
  shorter = ResNet(3, (1, 1), form="v1")
  del only_first["block2"]["unit2"]
  np.testing.assert_array_equal(
    run(shorter, only_first)[1]["block2"], out["block2"]
  )


@pytest.mark.slow
def test_computing_again_changes_nothing():
  params = random_params("v2")

  def loss(model):
    fn = lambda p: jnp.sum(model.apply({"params": p}, IMAGES)[0] ** 2)
    return jax.jit(jax.value_and_grad(fn))(params)

  plain, again = (loss(ResNet(**SMALL, remat=r)) for r in ("none", "full"))
  # One compiler pass may order the sums of one program otherwise.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
    plain,
    again,
  )


@pytest.mark.slow
def test_bfloat16_keeps_the_head_in_float32():
  params = random_params("v2")
  logits, out = run(ResNet(**SMALL, dtype="bfloat16"), params)
  assert out["block2"].dtype == jnp.bfloat16
  assert logits.dtype == out["pre_logits"].dtype == jnp.float32
  exact = run(ResNet(**SMALL), params)[0]
  # Eight bits of mantissa, through seven layers.
  np.testing.assert_allclose(logits, exact, atol=0.1 * np.abs(exact).max())


def test_what_the_root_sees_beyond_the_border():
  """Padding zeros are the maximum where all values inside are negative."""
  images = np.ones((1, 4, 4, 3), "f")
  params = jax.tree.map(np.copy, random_params("v2"))
  kernel = -np.abs(params["conv_root"]["kernel"])
  params["conv_root"]["kernel"] = kernel
  params = {k: params[k] for k in ("conv_root", "head", "norm-pre-head")}
  params["norm-pre-head"] = {"scale": np.ones(32), "bias": np.zeros(32)}
  params["head"] = {"kernel": np.zeros((32, 3)), "bias": np.zeros(3)}
  roots = {
    pad: run(ResNet(3, (), root_pad=pad), params, images)[1]["root"]
    for pad in ("zero", "nothing")
  }
  conv = np.asarray(roots["nothing"])
  np.testing.assert_array_equal(roots["zero"], np.maximum(conv, 0))
  assert (conv < 0).any()

"""The frozen part of a model: its activations in the place of images."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import linen as nn
from steps import ONE, assert_losses_are_close, placed

from vit_jax import sharding
from vit_jax.config import model_config
from vit_jax.finetune import frozen

STEM = ("embedding/*", "cls", "registers", "Transformer/pos*")
FIRST = (*STEM, "Transformer/encoderblock_[01]/*")
BLOCKS = (*STEM, "*/encoderblock*")
BODY = (*STEM, "MAPHead*", "dist", "Transformer/*")
MODERN = dict(model__name="modern", model__variant="Ti/8")
NORM = "Transformer/encoder_norm"
BLOCK_2 = "Transformer/encoderblock_2"

# What is frozen, options of the model -> the first trained module.
CASES = {
  "head, scan": (BODY, dict(model__scan=True), "head"),
  "half": (FIRST, dict(optim__microbatch=4, model__remat="full"), BLOCK_2),
  "modern": (
    FIRST,
    MODERN
    | dict(model__rope="dinov3", model__posemb="none", model__registers=2),
    BLOCK_2,
  ),
  "bfloat16": (FIRST, dict(model__dtype="bfloat16"), BLOCK_2),
  "pooling by attention": (
    (*STEM, "Transformer/*"),
    dict(model__pool="map"),
    "MAPHead_0",
  ),
  "resnet": (
    ("root*", "block*", "norm*", "conv*"),
    tiny.RESNET | dict(model__depth=None),
    "head",
  ),
}

MOST_UNLIKE = ("head, scan", "modern")


def parts(freeze, **options):
  """The tiny model with three blocks, on one device; its rule is linear.

  (Adam divides a gradient by its size, however small, and so its rounding.)
  """
  options = {
    "model__depth": 3,
    "optim__name": "sgd",
    "optim__weight_decay": 0.1,
    **options,
  }
  config = tiny.config(optim__freeze=freeze, optim__ema_decay=0.9, **options)
  return tiny.Parts(config, ONE)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=pytest.mark.slow if name in MOST_UNLIKE else pytest.mark.nightly,
    )
    for name in CASES
  ],
)
def test_a_step_from_activations_is_the_step_from_images(name):
  freeze, options, first = CASES[name]
  model = parts(freeze, **options)
  part = model.trainer.trainable.frozen_part
  assert part.first_trained == first
  ordinary, other = placed(model), placed(model)
  compute = jax.jit(part)
  for i in range(2):
    batch = tiny.batch(i, model.config)
    x = np.asarray(compute(ordinary.model_params, jnp.asarray(batch["image"])))
    assert x.shape[1:] == part.output.shape and x.dtype == part.output.dtype
    feed = [{**batch, "image": image} for image in (batch["image"], x)]
    images, entered = (sharding.to_global(b, model.mesh) for b in feed)
    ordinary, metrics = model.train_step(ordinary, images)
    other, others = model.train_step(other, entered)
  assert metrics.keys() == others.keys() and float(others["grad_norm"]) > 0
  # XLA adds up products of float32 in another order where it fuses otherwise: a
  # few 2^-24 of the largest terms. In bfloat16 it may leave out roundings of
  # 2^-9 inside of a step.
  rtol, atol = (1e-5, 1e-6) if x.dtype == np.float32 else (2**-5, 2**-9)
  for a, b in zip(
    jax.tree.leaves((ordinary, metrics)),
    jax.tree.leaves((other, others)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
  predict = jax.jit(model.trainer.predict)
  logits, out = predict(ordinary.model_params, jnp.asarray(batch["image"]))
  same, nothing = predict(ordinary.model_params, jnp.asarray(x))
  np.testing.assert_allclose(logits, same, rtol=rtol, atol=4 * atol)
  assert out and nothing == {}


@pytest.mark.slow
def test_of_the_frozen_part_nothing_is_computed():
  model = parts(FIRST)
  part, state = model.trainer.trainable.frozen_part, placed(model)
  batch = tiny.batch(0, model.config)
  images = jnp.asarray(batch["image"])

  def flops(fn, *args):
    return fn.lower(*args).compile().cost_analysis()["flops"]

  def of_step(image):
    args = sharding.to_global({**batch, "image": image}, model.mesh)
    return flops(model.train_step, state, args)

  fn = jax.jit(part)
  x = np.asarray(fn(state.model_params, images))
  saved = of_step(batch["image"]) - of_step(x)
  # What XLA counts beside products differs where it fuses otherwise.
  forward = flops(fn, state.model_params, images)
  np.testing.assert_allclose(saved, forward, rtol=0.02)


@pytest.mark.parametrize(
  "freeze, options",
  [
    ((), {}),
    (STEM, {}),
    (("Transformer/encoderblock_3/*",), {}),
    (("head/*",), dict(lora__rank=2)),  # adapters are in all blocks
  ],
)
def test_a_part_without_a_block_is_none(freeze, options):
  assert parts(freeze, **options).trainer.trainable.frozen_part is None


def test_a_trained_module_of_unknown_place_is_in_no_part():
  """The last norm of a ResNet is in front of the head that is trained, too."""
  leaf = {"kernel": 0.0}
  params = {"block1": leaf, "norm-pre-head": leaf, "head": leaf}
  bit = model_config("bit")
  assert frozen.first_trained(params, ("block1/*",), bit) is None
  assert frozen.first_trained(params, ("block1/*", "norm*"), bit) == "head"
  assert frozen.first_trained(params, ("*",), bit) is None  # nothing is trained


def test_a_model_of_another_family_may_be_random_too():
  """Its options may have any name, as in examples/my_lab/plain.py."""

  class Noisy(nn.Module):
    @nn.compact
    def __call__(self, images, *, is_training=False, records=None):
      x = nn.Dense(4, name="body")(images.mean((1, 2)))
      x = nn.Dropout(0.5, deterministic=not is_training)(x)
      return nn.Dense(2, name="head")(x), {}

  images, config = jnp.zeros((1, 16, 16, 3)), parts(BLOCKS).config
  params = Noisy().init(jax.random.key(0), images)["params"]
  config = dataclasses.replace(
    config, optim=dataclasses.replace(config.optim, freeze=("body/*",))
  )
  part = frozen.part_of(config, Noisy(), params, (16, 16))
  assert part.first_trained == "head" and part.is_random
  assert not parts(BLOCKS).trainer.trainable.frozen_part.is_random


@pytest.mark.slow
def test_frozen_kernels_of_a_scan_that_are_split():
  config = tiny.config(
    model__scan=True,
    optim__freeze=("Transformer/encoderblock/*kernel",),
    mesh__data=2,
    mesh__fsdp=4,
  )
  mesh = tiny.config().mesh
  one, split = (
    tiny.Parts(dataclasses.replace(config, mesh=mesh), ONE),
    tiny.Parts(config),
  )
  runs = [parts.run(2, placed(parts))[1] for parts in (one, split)]
  assert_losses_are_close(*runs)  # sums of float32 in another order
  norms = [[m["grad_norm"] for m in metrics] for metrics in runs]
  np.testing.assert_allclose(*norms, rtol=1e-5)

"""Layers that are put together of tokens, as DINOv2 and DINOv3 are scored."""

import doctest

import jax
import numpy as np
import pytest

from vit_jax.evaluators import features
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig
from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.zoo.families.modern import ModernConfig

SIZE = dict(variant="B/8", width=24, depth=3, mlp_dim=40, num_heads=3)


def _model(config):
  images = jax.random.uniform(jax.random.key(1), (2, 16, 24, 3), minval=-1)
  model = build(config, 0)
  params = model.init(jax.random.key(0), images)["params"]
  # The last norm is none of the identity.
  params = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), params
  )
  _, out = jax.jit(model.apply)({"params": params}, images)
  return params, out


def _normed(x, norm, eps):
  x = np.asarray(x, np.float64)
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
  return x * np.asarray(norm["scale"]) + np.asarray(norm["bias"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "config, first",
  [
    (ModernConfig(**SIZE, registers=4, layer_scale=0.3, ln_eps=1e-5), 5),
    (ModernConfig(**SIZE, distilled=True), 2),
    (ViTConfig(**SIZE), 1),
    (ViTConfig(**SIZE, scan=True), 1),
  ],
  ids=["registers", "distilled", "vit", "scan"],
)
def test_class_tokens_and_patches(config, first):
  params, out = _model(config)
  norm = params["Transformer"]["encoder_norm"]
  tokens = [
    _normed(out[f"encoderblock_{i}"]["after_mlp"], norm, config.ln_eps)
    for i in range(3)
  ]
  patches = tokens[2][:, first:].mean(1)
  assert tokens[2].shape[1] - first == 6
  expected = {
    "cls": tokens[2][:, 0],
    "cls+patches": np.concatenate([tokens[2][:, 0], patches], 1),
    "cls*2": np.concatenate([tokens[1][:, 0], tokens[2][:, 0]], 1),
    "cls*3+patches": np.concatenate([*(t[:, 0] for t in tokens), patches], 1),
  }
  for layer, value in expected.items():
    result = features.joined(out, params, config, (layer,))
    np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-5)
  # Parts of several layers are computed once.
  several = features.joined(out, params, config, tuple(expected))
  order = [tokens[2][:, 0], patches, tokens[1][:, 0], tokens[0][:, 0]]
  np.testing.assert_allclose(
    several, np.concatenate(order, 1), rtol=1e-4, atol=1e-5
  )


@pytest.mark.slow
def test_intermediates_are_layers_as_before():
  config = ViTConfig(**SIZE)
  params, out = _model(config)
  result = features.joined(out, params, config, ("encoderblock_1/mlp",))
  expected = out["encoderblock_1"]["mlp"].mean(1)
  np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
  "model, layer, message",
  [
    (
      ViTConfig(**SIZE, pool="gap"),
      "cls",
      "with pool='gap' has no class token",
    ),
    (BiTConfig(variant="R50x1"), "cls", "R50x1 with pool=None has no class"),
    (
      ViTConfig(**SIZE),
      "cls*4",
      "got 'cls*4', expected a number of blocks from",
    ),
    (ModernConfig(**SIZE, final_norm="pooled"), "cls", "has no norm of the"),
    (ViTConfig(**SIZE), "cls*3+patches", None),
    (ViTConfig(**SIZE), "pre_logits", None),
  ],
)
def test_models_without_the_tokens(model, layer, message):
  for config, key in (
    (KnnConfig(layer=layer), "layer"),
    (LinearConfig(layers=("pre_logits", layer)), "layers"),
  ):
    errors = [*config.model_errors("config.evals.x", model)]
    assert bool(errors) == bool(message)
    if message:
      assert errors[0].startswith(f"config.evals.x.{key}: ")
      assert message in errors[0]


def test_examples():
  assert doctest.testmod(features).failed == 0

"""Layers that are put together of tokens, as DINOv2 and DINOv3 are scored."""

import functools

import jax
import numpy as np
from self_supervised import methods

from vit_jax.evaluators import features
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig
from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.self_supervised import segmentation
from vit_jax.zoo.families.modern import ModernConfig

SIZE = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)


def normed(x, norm, eps):
  x = np.asarray(x, np.float64)
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
  return x * np.asarray(norm["scale"]) + np.asarray(norm["bias"])


def test_class_tokens_and_patches():
  """Of a model with registers, and of its last blocks, which are in a loop."""
  options = dict(registers=4, layer_scale=0.3, ln_eps=1e-5, scan=True)
  config = ModernConfig(**SIZE, **options)
  images = jax.random.uniform(jax.random.key(1), (2, 16, 24, 3), minval=-1)
  model = build(config, 0)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  params = methods.drawn(shapes["params"])
  _, out = jax.jit(model.apply)({"params": params}, images)
  norm = params["Transformer"]["encoder_norm"]
  tokens = [
    normed(out[f"encoderblock_{i}"]["after_mlp"], norm, config.ln_eps)
    for i in range(2)
  ]
  (inner, last), patches = (t[:, 0] for t in tokens), tokens[1][:, 5:].mean(1)
  expected = {
    "cls": last,
    "cls+patches": np.concatenate([last, patches], 1),
    "cls*2": np.concatenate([inner, last], 1),
    "cls*2+patches": np.concatenate([inner, last, patches], 1),
  }
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  for layer, value in expected.items():
    close(features.joined(out, params, config, (layer,)), value)
  # Parts of several layers are computed once.
  several = features.joined(out, params, config, tuple(expected))
  close(several, np.concatenate([last, patches, inner], 1))
  # An intermediate has no norm.
  result = features.joined(out, params, config, ("encoderblock_1/mlp",))
  np.testing.assert_array_equal(result, out["encoderblock_1"]["mlp"].mean(1))
  # Patches on their grid, for segmentation.
  got = segmentation.patches_of(out, params, config, (2, 3), 2)
  both = np.concatenate([t[:, 5:] for t in tokens], -1)
  close(got, both.reshape(2, 2, 3, 48))


def test_models_without_the_tokens():
  for model, layer, word in (
    (ViTConfig(**SIZE, pool="gap"), "cls", "no class token"),
    (BiTConfig(variant="R50x1"), "cls", "no class"),
    (ViTConfig(**SIZE), "cls*3", "number of blocks"),
    (ModernConfig(**SIZE, final_norm="pooled"), "cls", "no norm"),
    (ViTConfig(**SIZE), "cls*2+patches", None),
    (ViTConfig(**SIZE), "pre_logits", None),
  ):
    for config, key in (
      (KnnConfig(layer=layer), "layer"),
      (LinearConfig(layers=("pre_logits", layer)), "layers"),
    ):
      errors = [*config.model_errors("evals.x", model)]
      assert bool(errors) == bool(word), layer
      assert all(word in e and f"evals.x.{key}: " in e for e in errors)

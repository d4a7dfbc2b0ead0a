"""Weights and models of tests that fit one to the other."""

import functools
import pathlib

import foreign
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from weight_files import DATA, SIZE

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.weights.weights_file import lazy

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def make_target(model, image=(32, 32), num_classes=11):
  shapes = foreign.shapes(model, num_classes, tuple(image))
  structs = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
  return unflatten_dict(structs, sep="/")


def published(name="vit_token_prelogits"):
  """Weights with a class token on a grid of 4 x 4, 2 blocks, 11 classes."""
  return weights.read(DATA / f"{name}.weights.npz")


def random_weights(model, image, **fields):
  """Random weights of a model for images of this size."""
  params = foreign.random_params(model, 11, image)
  params = {k: lazy(v) for k, v in params.items()}
  return weights.Weights("random", "google", params, **fields)


def adapt(file, image=(32, 32), num_classes=11, adapt_options=None, **fields):
  model = model_config(**SIZE | fields)
  target = make_target(model, image, num_classes)
  params, report = weights.adapt(
    file, target, model, image, **adapt_options or {}
  )
  return flatten_dict(params, sep="/"), report

"""Small files of weights, as tests of reading need them."""

import functools
import json
import pathlib

import foreign
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict

import vit_jax
from vit_jax.config import model_config
from vit_jax.weights import safetensors_file
from vit_jax.zoo.files import hf_classes, hf_preprocessing

DATA = pathlib.Path(__file__).parents[1] / "data"
SIZE = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
MODEL = model_config(**SIZE)


def published(name="vit_linen_names"):
  """Arrays of a ViT with 2 blocks on a grid of 4 x 4, 11 classes."""
  with np.load(DATA / f"{name}.weights.npz") as file:
    return dict(file)


def save(path, **changes):
  """Writes a `.npz` with other arrays in it; None leaves one out."""
  arrays = published() | {k.replace("__", "/"): v for k, v in changes.items()}
  np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
  return path


@functools.cache
def our_params(image=(32, 32), num_classes=11):
  return foreign.random_params(MODEL, num_classes, image)


def nested(params):
  return unflatten_dict(params, sep="/")


def message(path, **options):
  """Returns the error for a path that cannot be loaded."""
  with pytest.raises((ValueError, FileNotFoundError)) as e:
    vit_jax.load(path, **options)
  return str(e.value)


def hf_folder(folder, image=(32, 48), **changes):
  arrays, config = hf_classes.write(
    our_params(image), MODEL, num_classes=11, image_size=image
  )
  about, _ = hf_preprocessing.write(f"decode|resize({image})", image)
  folder.mkdir()
  safetensors_file.write(folder / "model.safetensors", arrays, {})
  (folder / "config.json").write_text(json.dumps(config | changes))
  (folder / hf_preprocessing.FILE).write_text(json.dumps(about))
  return folder


def orbax(folder, tree):
  with ocp.PyTreeCheckpointer() as writer:
    writer.save(folder, tree)
  return folder


def assert_same(result, params):
  assert result.params.keys() == params.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(result.params[name], array, name)

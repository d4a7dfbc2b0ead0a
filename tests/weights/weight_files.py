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
from vit_jax.zoo.files import hf_classes, hf_preprocessing, openclip, timm

DATA = pathlib.Path(__file__).parents[1] / "data"
SIZE = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
MODEL = model_config(**SIZE)
TOWER = model_config(
  "modern", **SIZE, pre_norm=True, patch_bias=False, ln_eps=1e-5, gelu="erf"
)
WEIGHTS = "model.safetensors"
# Name in transformers' models in memory -> name in its files.
TRANSFORMERS = {
  "layers.": "encoder.layer.",
  ".attention.q_proj.": ".attention.attention.query.",
  ".attention.k_proj.": ".attention.attention.key.",
  ".attention.v_proj.": ".attention.attention.value.",
  ".attention.o_proj.": ".attention.output.dense.",
  ".mlp.fc1.": ".intermediate.dense.",
  ".mlp.fc2.": ".output.dense.",
}


def published_arrays(name="vit_linen_names"):
  """Arrays of a ViT with 2 blocks on a grid of 4 x 4, 11 classes."""
  with np.load(DATA / f"{name}.weights.npz") as file:
    return dict(file)


def save(path, **changes):
  """Writes a `.npz` with other arrays in it; None leaves one out."""
  arrays = published_arrays() | {
    k.replace("__", "/"): v for k, v in changes.items()
  }
  np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
  return path


@functools.cache
def our_params(image=(32, 32), num_classes=11, model=MODEL):
  return foreign.random_params(model, num_classes, image)


def nested(params):
  return unflatten_dict(params, sep="/")


def message(path, **options):
  """Returns the error for a path that cannot be loaded."""
  with pytest.raises((ValueError, FileNotFoundError)) as e:
    vit_jax.load(path, **options)
  return str(e.value)


def write(path, arrays, changes=None, metadata=None):
  """Writes a `.safetensors` with other arrays in it; None leaves one out."""
  arrays = {**arrays, **(changes or {})}
  arrays = {k: v for k, v in arrays.items() if v is not None}
  path.parent.mkdir(exist_ok=True)
  safetensors_file.write(path, arrays, metadata or {})
  return path


def timm_file(
  folder, about=None, changes=None, metadata=None, model=MODEL, params=None,
  num_classes=11,
):  # fmt: skip
  """Writes a model of timm's, and its config.json if there is one."""
  if params is None:
    params = our_params(model=model, num_classes=num_classes)
  arrays = timm.write(params, model, grid=(4, 4))
  path = write(folder / WEIGHTS, arrays, changes, metadata)
  if about is not None:
    (folder / "config.json").write_text(json.dumps(about))
  return path


def openclip_folder(
  folder, vision=None, changes=None, model=TOWER, params=None, **about
):
  """Writes a tower of OpenCLIP's, and a config that states heads of 12."""
  if params is None:
    params = our_params((32, 32), 0, model)
  write(folder / "x.safetensors", openclip.write(params, TOWER), changes)
  vision = {"head_width": 12} | (vision or {})
  about = {"model_cfg": {"vision_cfg": vision}} | about
  (folder / openclip.CONFIG).write_text(json.dumps(about))
  return folder


def trunk_folder(folder, vision=None, changes=None, wrapper=""):
  """Writes a tower that OpenCLIP takes from timm."""
  arrays = timm.write(our_params(num_classes=0), MODEL)
  arrays = {openclip.TRUNK + name: a for name, a in arrays.items()}
  arrays = {wrapper + k: v for k, v in (arrays | (changes or {})).items()}
  write(folder / "x.safetensors", arrays)
  about = {
    "model_cfg": {"vision_cfg": {"timm_model_name": "a_vit"} | (vision or {})},
    "preprocess_cfg": {"std": [0.25] * 3, "resize_mode": "squash"},
  }
  (folder / openclip.CONFIG).write_text(json.dumps(about))
  return folder


def hf_folder(
  folder, image=(32, 48), changes=None, about=None, model=MODEL,
  num_classes=11, **config,
):  # fmt: skip
  """Writes a model of transformers; None leaves an array or a file out.

  Args:
    folder: A new folder, or an empty one.
    image: Height and width.
    changes: Other arrays.
    about: The contents of the preprocessor's file.
    model, num_classes: What is written.
    **config: Other contents of config.json.
  """
  arrays, own = hf_classes.write(
    our_params(image, num_classes, model),
    model,
    num_classes=num_classes,
    image_size=image,
  )
  write(folder / WEIGHTS, arrays, changes)
  (folder / "config.json").write_text(json.dumps(own | config))
  if about is None:
    about, _ = hf_preprocessing.write(f"decode|resize({image})", image)
  if about:
    (folder / hf_preprocessing.FILE).write_text(json.dumps(about))
  return folder


def orbax(folder, tree):
  with ocp.PyTreeCheckpointer() as writer:
    writer.save(folder, tree)
  return folder


def assert_same(result, params):
  """Asserts that weights, or flat parameters, are these to the bit."""
  got = getattr(result, "params", result)
  assert got.keys() == params.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(got[name], array, name)

"""Weights of PyTorch libraries: `.safetensors`, and the files beside them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.config import eval_preprocessing, json_file, model_from_dict
from vit_jax.paths import file_in
from vit_jax.weights import hf, hf_preprocessing, timm, timm_config
from vit_jax.weights.identify import identify
from vit_jax.weights.timm_config import TimmConfig
from vit_jax.weights.weights_file import (
  METADATA_KEY,
  POS_EMBEDDING,
  LazyArray,
  Metadata,
  Weights,
  model_of,
  unknown_names,
  with_metadata,
)


class Safetensors(NamedTuple):
  """What is in a `.safetensors`, and what is known of it from elsewhere.

  path: The file, or its folder.
  arrays: By name.
  texts: Metadata in the file.
  config: What config.json beside it holds.
  options: What the caller knows better.
  """

  path: epath.Path
  arrays: dict[str, LazyArray]
  texts: Mapping[str, str]
  config: dict[str, Any]
  options: dict[str, Any]


def from_safetensors(file: Safetensors) -> Weights:
  for looks_like, read_all in SAFETENSORS.values():
    if looks_like(file.arrays):
      return read_all(file)
  raise ValueError(unknown_names(file.path, file.arrays))


def _from_timm(file: Safetensors) -> Weights:
  where = f"{file.path}: {METADATA_KEY} in its header"
  ours = json_file.parse(file.texts.get(METADATA_KEY, "{}"), where)
  json_file.build(Metadata, ours, where)
  config = TimmConfig()
  if ours:
    stated = {"num_heads": _num_heads(ours)}
  else:
    config = TimmConfig.of(file.config, f"{file.path}: config.json")
    stated = timm_config.stated(config)
  if num_heads := file.options.get("num_heads"):
    stated["num_heads"] = num_heads
  params, options = timm.read(file.arrays, **stated)
  weights = Weights(str(file.path), "timm", params, options)
  if ours:
    return with_metadata(weights, ours)
  options |= timm_config.options(config, params)
  size, grid = config.image_size, None
  if size and size[0] != size[1] and POS_EMBEDDING in params:
    grid = identify(params, options).grid(size)
  weights = dataclasses.replace(
    weights,
    grid=grid,
    image_size=size,
    class_names=config.images.label_names or None,
  )
  if size:
    weights = _timm_images(weights, config)
  return _fold(weights, config.images.mean, config.images.std)


def _from_hf(file: Safetensors) -> Weights:
  path = file.path
  if not file.config:
    raise ValueError(
      f"got {str(path)!r} without a config.json beside it, which tells the"
      " heads and the form of GELU; expected the folder of a Hugging Face"
      " model."
    )
  params, options, extras = hf.read(file.arrays, file.config)
  size = extras["image_size"]
  folder = path if path.is_dir() else path.parent
  about = json_file.read(file_in(folder, hf_preprocessing.FILE))
  about = hf_preprocessing.complete(about)
  ops = hf_preprocessing.ops_of(about, size)
  weights = Weights(
    str(path),
    "hf",
    params,
    options,
    grid=(size[0] // extras["patch"], size[1] // extras["patch"]),
    image_size=size,
    class_names=extras["class_names"],
    loss=extras["loss"],
    ops=ops,
    notes=() if ops or not about else (hf_preprocessing.unlike(about, size),),
  )
  stated = hf_preprocessing.typed(about)
  mean, std = stated.image_mean, stated.image_std
  if not stated.do_normalize:
    mean, std = [0.0] * 3, [1.0] * 3
  return _fold(weights, mean, std, hf_preprocessing.white(about))


# Names that the arrays may have: whether these are such, and what reads them.
SAFETENSORS = {
  "timm": (timm.looks_like, _from_timm),
  "hf": (hf.looks_like, _from_hf),
}


def _num_heads(metadata: Mapping[str, Any]) -> int | None:
  if not model_of(metadata):
    return None
  model = model_from_dict(model_of(metadata))
  return model.size.num_heads if model.name == "vit" else None


def _timm_images(weights: Weights, config: TimmConfig) -> Weights:
  """Adds timm's evaluation, from config.json; the nearest to it, with a note,
  where no operations are the same.
  """
  size, notes = weights.image_size, weights.notes
  share, filter = config.images.crop_pct, config.images.interpolation
  mode = config.images.crop_mode
  if not 0.01 <= share <= 100:
    raise ValueError(
      f"config.json: crop_pct: got {share}, expected the side of the crop by"
      " that of the image, such as 0.875."
    )
  path = eval_preprocessing.timm(size, min(share, 1.0), filter, mode)
  ops = path.ops
  if mode == "squash" and share < 1:
    ops = eval_preprocessing.centre_of(
      path, tuple(int(s / share) for s in size)
    )
  is_cropped = mode == "center" and size[0] == size[1]
  # Above 1, timm alone puts a frame around the image.
  if path.filter != filter or share > 1 or not (is_cropped or mode == "squash"):
    keys = "input_size", "interpolation", "crop_pct", "crop_mode"
    notes += (
      eval_preprocessing.unlike("config.json", config.about_images, keys, size),
    )
  return dataclasses.replace(
    weights,
    ops=ops,
    notes=notes,
    crop_share=min(share, 1.0) if path.short else None,
  )


def _fold(weights: Weights, mean, std, white: float = 1.0) -> Weights:
  """Moves a normalisation other than to [-1, 1] into the patch embedding.

  A model trained on (p - mean) / std of pixels p in [0, white] gets
  x = 2 p / white - 1 from us. With mean and std divided by white, that is
  (x + 1 - 2 mean) / (2 std): the kernel is scaled, the bias moved.
  """
  mean, std = (np.asarray(v or [0.5] * 3) / white for v in (mean, std))
  if np.allclose(mean, 0.5) and np.allclose(std, 0.5):
    return weights
  if not np.all(std > 0):
    raise ValueError(
      f"got images normalised with the deviation {std.tolist()}, expected more"
      " than 0; mend the file beside the weights."
    )
  params = dict(weights.params)
  if "embedding/kernel" not in params or "conv_root/kernel" in params:
    raise ValueError(
      f"got images normalised with mean {mean.tolist()} and deviation"
      f" {std.tolist()}, expected 0.5 and 0.5 for a model that begins with a"
      " standardised convolution."
    )
  if "embedding/bias" not in params:
    raise ValueError(
      "got a patch embedding without its bias, expected both: images were"
      " normalised otherwise than ours, which becomes part of it."
    )
  kernel, bias = params["embedding/kernel"], params["embedding/bias"]
  scale, shift = 0.5 / std, (0.5 - mean) / std

  def scaled():
    return (np.asarray(kernel) * scale[:, None]).astype(np.float32)

  def moved():
    added = np.einsum("hwio,i->o", np.asarray(kernel, np.float64), shift)
    return (np.asarray(bias) + added).astype(np.float32)

  # float32, whatever the file has: half precision would round once more.
  float32 = np.dtype(np.float32)
  params["embedding/kernel"] = LazyArray(kernel.shape, float32, scaled)
  params["embedding/bias"] = LazyArray(bias.shape, float32, moved)
  note = (
    f"images were normalised with mean {mean.tolist()} and deviation"
    f" {std.tolist()}; this is now part of the patch embedding, which gets"
    " images in [-1, 1]."
  )
  return dataclasses.replace(
    weights, params=params, notes=(*weights.notes, note)
  )

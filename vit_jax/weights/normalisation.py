"""Images that a model expects normalised otherwise than to [-1, 1]."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.weights.weights_file import LazyArray, Weights


def fold(
  weights: Weights,
  mean: Sequence[float] | None,
  std: Sequence[float] | None,
  white: float = 1.0,
) -> Weights:
  """Moves a normalisation of images into the patch embedding.

  The model was trained on (p - mean) / std of pixels p in [0, white]; it will
  get x = 2 p / white - 1. With mean and std divided by white, the old input is
  (x + 1 - 2 mean) / (2 std): the kernel is scaled, and the bias moved.

  Args:
    weights: Weights of the model.
    mean, std: One number for each channel; None: 0.5.
    white: What the library makes of the value 255 before it normalises.

  Raises:
    ValueError: The model has no patch embedding that could take it.
  """
  mean, std = (np.asarray(v or [0.5] * 3) / white for v in (mean, std))
  if np.allclose(mean, 0.5) and np.allclose(std, 0.5):
    return weights
  if not np.all(std > 0):
    raise ValueError(
      f"got images normalised with the deviation {std.tolist()}, expected more"
      " than 0; correct the file beside the weights."
    )
  params = dict(weights.params)
  kernel, bias = (params.get(f"embedding/{k}") for k in ("kernel", "bias"))
  if kernel is None or bias is None or "conv_root/kernel" in params:
    raise ValueError(
      f"got images normalised with mean {mean.tolist()} and deviation"
      f" {std.tolist()}, expected 0.5 and 0.5 for a model that does not begin"
      " with a patch embedding, kernel and bias."
    )
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

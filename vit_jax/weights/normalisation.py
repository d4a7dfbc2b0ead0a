"""Image normalisations of published models other than [-1, 1]."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.options import unexpected
from vit_jax.weights.identification import stated_model
from vit_jax.weights.weights_file import LazyArray, Pixels, Weights

# Normalisations of publishers, by the name that `mean` takes.
NAMED: dict[str, Pixels] = {
  # Google, SigLIP.
  "half": Pixels((0.5,) * 3, (0.5,) * 3),
  # DINO, MAE, DeiT.
  "imagenet": Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
  "clip": Pixels(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
  ),
}
HALF = NAMED["half"]
# Notes on a normalisation that nothing states; "half" is images in [-1, 1].
ASSUMED = (
  "nothing states how images were normalised: mean={!r} is assumed; mean="
  " (--mean, for training --config.init_mean) states another."
)
UNSTATED = ASSUMED.format("half")

# Largest magnitude of a mean or deviation, for pixels in [0, 1].
LARGEST = 10.0
NUMBERS = "a number, or one for each channel, of pixels in [0, 1]"
FORMS = f"mean, one of {', '.join(NAMED)}; or both, each {NUMBERS}"
# Types of a mean or deviation that a user gives.
Statement = str | float | int | Sequence[float] | None


def stated(mean: Statement, std: Statement = None) -> Pixels | None:
  """Returns the normalisation that a user gives, or None.

  Args:
    mean: A name of `NAMED`, which also gives the deviation; or a number for
      each channel, or one for all, for pixels in [0, 1]. In text, numbers have
      commas between them, and "MEAN/STD" gives both.
    std: Numbers, as `mean`; only if `mean` is numbers.

  Raises:
    ValueError: One is missing, is not a number, or is one of pixels in 0 to
      255.

  Example:
    >>> stated("0.5/0.25,0.5,0.25").std
    (0.25, 0.5, 0.25)
  """
  if mean is None and std is None:
    return None
  if isinstance(mean, str) and std is None and "/" in mean:
    mean, std = mean.split("/", 1)
  is_named = isinstance(mean, str) and mean in NAMED
  if is_named and std is None:
    return NAMED[mean]
  if is_named or mean is None or std is None:
    raise ValueError(unexpected("mean, std", f"{mean!r}, {std!r}", FORMS))
  return Pixels(_numbers("mean", mean, -LARGEST), _numbers("std", std, 1e-4))


def _numbers(name: str, value, low: float) -> tuple[float, ...]:
  """Returns a number for each channel, from `low` to `LARGEST`."""
  parts = value.split(",") if isinstance(value, str) else np.ravel(value)
  try:
    numbers = tuple(float(part) for part in parts)
  except (TypeError, ValueError):
    numbers = ()
  if not numbers or not all(low <= n <= LARGEST for n in numbers):
    raise ValueError(unexpected(name, repr(value), NUMBERS))
  return numbers


def fold(weights: Weights) -> Weights:
  """Moves the normalisation of images into the patch embedding.

  The model was trained on (p - mean) / std of pixels p in [0, 1]; it will get
  x = 2 p - 1. The old input is (x + 1 - 2 mean) / (2 std), so the kernel is
  scaled and the bias shifted. Without a bias, the learned positions of the
  patches are shifted: both are added to a patch, and resampling does not change
  a constant.

  Args:
    weights: Weights of the model. Without a normalisation, that of their
      publishers is assumed, or 0.5 and 0.5, and a note says so.

  Raises:
    ValueError: The model has no patch embedding for the normalisation.
  """
  pixels, name = weights.pixels, weights.published_pixels
  if pixels is None and name is None:
    return dataclasses.replace(weights, notes=(*weights.notes, UNSTATED))
  if pixels is None:
    pixels = NAMED[name]
    notes = (*weights.notes, ASSUMED.format(name))
    weights = dataclasses.replace(weights, pixels=pixels, notes=notes)
  mean, std = map(np.asarray, pixels)
  if np.allclose(mean, 0.5) and np.allclose(std, 0.5):
    return weights
  got = f"mean, std: got {mean.tolist()}, {std.tolist()}, expected"
  if not np.all(std > 0):
    raise ValueError(f"{got} std above 0.")
  params = dict(weights.params)
  model = stated_model(weights.options)
  patches, place = f"{model.PATCHES}/kernel", f"{model.PATCHES}/bias"
  kernel, bias = params.get(patches), params.get(place)
  table = None
  if bias is None:  # as in CLIP: the table is added to what the kernel makes
    in_stem = (k for k in params if model.block_of(k) is None)
    grids = (k for k in in_stem if model.positions(k) == "grid")
    place = table = next(grids, None)
    bias = params.get(place)
  if kernel is None or bias is None or "conv_root/kernel" in params:
    raise ValueError(f"{got} 0.5, 0.5 without a bias or positions of patches.")
  channels = kernel.shape[2]
  if any(len(x) != channels and np.ptp(x) for x in (mean, std)):
    raise ValueError(f"{got} one number each, or {channels} for the channels.")
  mean, std = (np.resize(x, channels) for x in (mean, std))
  scale, shift = 0.5 / std, (0.5 - mean) / std

  def scaled():
    return (np.asarray(kernel) * scale[:, None]).astype(np.float32)

  def moved():
    added = np.einsum("hwio,i->o", np.asarray(kernel, np.float64), shift)
    if table is not None:
      rows = np.arange(bias.shape[1]) >= weights.class_rows(model)
      added = rows[:, None] * added
    return (np.asarray(bias) + added).astype(np.float32)

  # float32, whatever the file has: half precision would round once more.
  float32 = np.dtype(np.float32)
  params[patches] = LazyArray(kernel.shape, float32, scaled)
  params[place] = LazyArray(bias.shape, float32, moved)
  note = (
    f"images were normalised with mean {mean.tolist()} and deviation"
    f" {std.tolist()}; this is now part of the patch embedding."
  )
  return dataclasses.replace(
    weights, params=params, notes=(*weights.notes, note)
  )

"""What short trials compare before fine-tuning, see `vit_jax.sweep.trials`."""

import re
from collections.abc import Iterable
from typing import Any

# Images with a shorter side below this get no crop of 5 to 100 % of the area:
# of 32 pixels it leaves as few as 7 x 7.
SMALL = 64


def candidates(
  size: tuple[int, int],
  lr: float,
  image_side: int,
  param_names: Iterable[str],
) -> dict[str, dict[str, Any]]:
  """Returns the name -> options of every candidate.

  They are augmentations, mirrored and not; three learning rates of the gentler
  ones; and, without augmentation, training of the head or the last half of the
  encoder's blocks alone.

  Args:
    size: Height and width of the model's input.
    lr: The learning rate in the middle.
    image_side: Shorter side of a typical image, in pixels.
    param_names: Paths of the parameters, such as "head/kernel".
  """
  height, width = size
  size = height if height == width else size
  augmentations = {
    "no augmentation": f"decode|resize({size})",
    "pad and crop": pad_and_crop(size),
    "crop of 50 to 100 %": f"decode_inception_crop({size}, 50)",
  }
  if image_side >= SMALL:
    augmentations["crop of 5 to 100 %"] = f"decode_inception_crop({size})"
  result = {
    f"{name}{', mirrored' * mirrored}": {
      "data.ops": ops + "|flip_lr" * mirrored
    }
    for name, ops in augmentations.items()
    for mirrored in (False, True)
  }
  for name in ("no augmentation", "pad and crop", "pad and crop, mirrored"):
    for factor in (1 / 3, 3):
      text = f"{name}, lr {factor * lr:.1g}"
      result[text] = {**result[name], "optim.lr": factor * lr}
  for part, frozen in _frozen(param_names).items():
    options = {**result["no augmentation"], "optim.freeze": frozen}
    result[f"{part} alone, no augmentation"] = options
  return result


def pad_and_crop(size: int | tuple[int, int]) -> str:
  """Returns ops that shift the whole image by up to an eighth of its side."""
  pad = max(1, (size if isinstance(size, int) else min(size)) // 8)
  return f"decode|resize({size})|pad({pad})|random_crop({size})"


def check_budget(text: str) -> None:
  """Raises ValueError unless the text is a time or a number of steps."""
  if not re.fullmatch(r"\d+(\.\d+)?[ms]|\d+", text):
    raise ValueError(
      f"got budget={text}, expected minutes such as 10m, the steps of all"
      " trials together such as 2000, or 0 for none."
    )


def _frozen(param_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
  """Returns what is trained -> the paths of all other parameters."""
  names = sorted(param_names)
  body = tuple(name for name in names if not name.startswith("head/"))
  block_of = {
    name: int(match[1])
    for name in body
    if (match := re.search(r"/encoderblock_(\d+)/", name))
  }
  if not block_of:
    return {"head": body}
  half = (max(block_of.values()) + 1) // 2
  norm = "Transformer/encoder_norm/"
  first = tuple(
    name
    for name in body
    if block_of.get(name, -1) < half and not name.startswith(norm)
  )
  return {"last half of the blocks": first, "head": body}

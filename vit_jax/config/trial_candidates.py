"""What short trials compare before fine-tuning, see `vit_jax.sweep.trials`."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from vit_jax.config.preprocessing import image_size
from vit_jax.config.schema import Config

# Changes of one kind: a config -> name of the change -> options that it sets.
Round = Callable[[Config], dict[str, dict[str, Any]]]

# Images with a shorter side below this get no crop of 5 to 100 % of the area:
# of 32 pixels it leaves as few as 7 x 7.
SMALL = 64


def rounds(image_side: int, param_names: Iterable[str]) -> list[Round]:
  """Returns the kinds of changes, in the order in which they are tried.

  Args:
    image_side: Shorter side of a typical image, in pixels.
    param_names: Paths of the parameters, such as "head/kernel".
  """
  frozen = _frozen(param_names)

  def augmentations(config):
    height, width = image_size(config.data.ops)
    size = height if height == width else (height, width)
    ops = {
      "pad and crop": pad_and_crop(size),
      "no augmentation": f"decode|resize({size})",
      "crop of 50 to 100 %": f"decode_inception_crop({size}, 50)",
    }
    if image_side >= SMALL:
      ops["crop of 5 to 100 %"] = f"decode_inception_crop({size})"
    return {name: {"data.ops": text} for name, text in ops.items()}

  def mirrored(config):
    return {"mirrored": {"data.ops": config.data.ops + "|flip_lr"}}

  def rates(config):
    values = [float(f"{config.optim.lr * f:.2g}") for f in (1 / 3, 3)]
    return {f"learning rate {v:g}": {"optim.lr": v} for v in values}

  def parts(config):
    return {k: {"optim.freeze": v} for k, v in frozen.items()}

  return [augmentations, mirrored, rates, parts]


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
    return {"the head alone": body}
  half = (max(block_of.values()) + 1) // 2
  norm = "Transformer/encoder_norm/"
  first = tuple(
    name
    for name in body
    if block_of.get(name, -1) < half and not name.startswith(norm)
  )
  return {"the last half of the blocks": first, "the head alone": body}

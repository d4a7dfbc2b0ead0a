"""Options that short trials compare before fine-tuning.

`vit_jax.finetune.trials` runs the trials.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vit_jax.config.schema import Config
from vit_jax.data.preprocessing import image_size
from vit_jax.families import ModelConfig
from vit_jax.objectives import OBJECTIVES
from vit_jax.options import unexpected

# A round of trials: config -> {name of a change: options that it sets}.
Round = Callable[[Config], dict[str, dict[str, Any]]]

# Images with a shorter side below this get no crop of 5 to 100 % of the area:
# of 32 pixels it leaves as few as 7 x 7.
SMALL = 64
# Models with at most this number of patches are also tried at a higher
# resolution, as in section 3.2 of arXiv:2010.11929. For others a trial at a
# higher resolution takes too long. A step at 1.5 times the resolution takes
# 2.25 times as long; with 1.5 times fewer steps, the run takes 1.5 times as
# long. Measured: docs/tasks/finetune.md.
FEW_PATCHES = 36
# Runs of more passes over the images do not try "no augmentation": short trials
# end before they overfit, and prefer it. On 4,000 digits of MNIST (56 passes),
# its held-out loss was 0.157 after 282 steps and 0.209 after 3,135; the loss
# of "pad and crop" was 0.170 and 0.044. On 20,000 photographs of CIFAR-10 (11
# passes), it had 63.6 % on the test split, and "pad and crop" 61.2 %.
MOST_PASSES = 15

_MIRRORED = "|flip_lr"
# Parameters that are new if the classes change, or that fine-tuning drops.
_NEW = (
  "pre_logits/",
  *filter(None, (cls.own for cls in OBJECTIVES.values())),
)


def rounds(
  image_side: int,
  num_images: int,
  params: Mapping[str, Any],
  model: ModelConfig,
  has_size: bool = False,
) -> list[Round]:
  """Returns the rounds of trials, in their order.

  Args:
    image_side: Shorter side of a typical image, in pixels.
    num_images: Number of training images.
    params: Path, such as "head/kernel" -> array of the pre-trained model.
    model: The model of a run.
    has_size: Whether the user has set the image size; then it is not changed.
  """
  frozen = _frozen(params, model)
  kernel = params.get(f"{model.PATCHES}/kernel")
  patch = None if kernel is None or has_size else kernel.shape[0]

  def augmentations(config):
    height, width = image_size(config.data.ops)
    ops = _augmentations(height if height == width else (height, width))
    if image_side < SMALL:
      del ops["crop of 5 to 100 %"]
    if _passes(config, num_images) > MOST_PASSES:
      del ops["no augmentation"]
    return {name: {"data.ops": text} for name, text in ops.items()}

  def mirrored(config):
    return {"mirrored": {"data.ops": config.data.ops + _MIRRORED}}

  def rates(config):
    values = [float(f"{config.optim.lr * f:.2g}") for f in (1 / 3, 3)]
    return {f"learning rate {v:g}": {"optim.lr": v} for v in values}

  def parts(config):
    if config.lora.rank:  # LoRA decides what is trained
      return {}
    return {k: {"optim.freeze": v} for k, v in frozen.items()}

  def larger(config):
    height, width = image_size(config.data.ops)
    few = patch and (height // patch) * (width // patch) <= FEW_PATCHES
    ops = config.data.ops.removesuffix(_MIRRORED)
    of_ops = {text: k for k, text in _augmentations(height).items()}
    if height != width or not few or ops not in of_ops:
      return {}
    size = round(1.5 * height / patch) * patch
    changed = _augmentations(size)[of_ops[ops]] + config.data.ops[len(ops) :]
    whole = f"decode|resize({size})"
    scored = {f"evals.{e.name}.ops": whole for e in config.evals}
    shorter = _shorter(config, height / size)
    return {
      f"{size} x {size} pixels": {"data.ops": changed, **scored, **shorter}
    }

  return [augmentations, mirrored, rates, parts, larger]


def _shorter(config: Config, factor: float) -> dict[str, Any]:
  """Returns options of a run with this factor of the steps."""
  options = {"optim.warmup_steps": round(factor * config.optim.warmup_steps)}
  if config.total_epochs is not None:
    return {**options, "total_epochs": factor * config.total_epochs}
  return {**options, "total_steps": max(1, round(factor * config.total_steps))}


def _passes(config: Config, num_images: int) -> float:
  """Returns how often a run reads each image."""
  if config.total_epochs is not None:
    return config.total_epochs
  return config.total_steps * config.data.batch_size / num_images


def _augmentations(size: int | tuple[int, int]) -> dict[str, str]:
  """Returns name -> operations that give images of this size."""
  return {
    "pad and crop": pad_and_crop(size),
    "no augmentation": f"decode|resize({size})",
    "crop of 50 to 100 %": f"decode_inception_crop({size}, 50)",
    "crop of 5 to 100 %": f"decode_inception_crop({size})",
  }


def pad_and_crop(size: int | tuple[int, int]) -> str:
  """Returns operations that shift the image by up to an eighth of its side."""
  pad = max(1, (size if isinstance(size, int) else min(size)) // 8)
  return f"decode|resize({size})|pad({pad})|random_crop({size})"


def check_budget(text: str) -> None:
  """Checks the budget of all trials.

  Raises:
    ValueError: The text is neither a time nor a number of steps.
  """
  if not re.fullmatch(r"\d+(\.\d+)?[ms]|\d+", text):
    expected = "a time, such as 10m or 90s, a number of steps, or 0"
    raise ValueError(unexpected("budget", text, expected))


def _frozen(
  param_names: Iterable[str], model: ModelConfig
) -> dict[str, tuple[str, ...]]:
  """Returns what is trained -> the paths of all other parameters."""
  body = tuple(
    name
    for name in sorted(param_names)
    if not (model.is_head(name) or name.startswith(_NEW))
  )
  blocks = {name: model.block_of(name) for name in body}
  block_of = {name: i for name, i in blocks.items() if i is not None}
  if not block_of:
    return {"the head alone": body}
  half = (max(block_of.values()) + 1) // 2
  norms = (f"{model.LAST_NORM}/", "pooled_norm/")  # the final norm
  first = tuple(
    name
    for name in body
    if block_of.get(name, -1) < half and not name.startswith(norms)
  )
  return {"the last half of the blocks": first, "the head alone": body}

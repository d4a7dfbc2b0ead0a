"""Checks of a config that need only the config; they return all errors.

Checks that need the machine or the disk (devices, data sets, weights) are in
`vit_jax.experiment`.
"""

from collections.abc import Iterator

from vit_jax.config import HELD_OUT, Config, LoRAConfig, OptimConfig
from vit_jax.config.schema import READ_BY
from vit_jax.data.preprocessing import (
  for_channels,
  image_size,
  view_errors,
)
from vit_jax.objectives import Classification
from vit_jax.options import shown

# float32 rounds this and larger decays to 1: nothing would be learned.
ROUNDS_TO_ONE = 1 - 2**-25


def errors(
  config: Config, is_training: bool = True, is_new: bool = True
) -> list[str]:
  """Returns all errors of the options, one text each.

  Args:
    config: Options of the run.
    is_training: False skips the length of the run and the optimizer.
    is_new: False skips the checks for a run that starts at step 0.
  """
  return [
    *size_errors(config, is_training),
    *option_errors(config, is_training, is_new),
  ]


def size_errors(config: Config, is_training: bool = True) -> list[str]:
  """Returns the errors of length, batch, model, objective and images.

  Without these errors the shapes of the run can be computed.

  Args:
    config: Options of the run.
    is_training: False skips the length of the run.
  """
  return [
    *(_length_errors(config) if is_training else ()),
    *_range_errors(config),
    *_batch_errors(config),
    *config.model.errors(),
    *config.objective.errors(),
    *_head_errors(config),
    *_image_errors(config),
  ]


def option_errors(
  config: Config, is_training: bool = True, is_new: bool = True
) -> list[str]:
  """Returns the errors that are not in `size_errors`; see `errors`."""
  return [
    *(_optim_errors(config.optim) if is_training else ()),
    *(_unread_errors(config.optim) if is_training and is_new else ()),
    *(_lora_errors(config.lora) if is_training else ()),
    *_evaluator_errors(config),
    *(_init_errors(config) if is_training else ()),
    *_mesh_errors(config),
    *(config.objective.start_errors(config.model) if is_new else ()),
    *_seed_errors(config.seed),
  ]


def warmup_errors(config: Config, total_steps: int) -> list[str]:
  """Returns an error unless the warm-up ends before the run does."""
  warmup = config.optim.warmup_steps
  if warmup < total_steps:
    return []
  return [
    f"config.optim.warmup_steps: got {warmup}, expected fewer than the"
    f" {total_steps} steps of the run; set it to {total_steps // 10}, or make"
    " the run longer (config.total_steps, config.total_epochs)."
  ]


def _seed_errors(seed: int) -> Iterator[str]:
  # jax draws from the last 32 bits, so that larger seeds repeat smaller ones.
  if not 0 <= seed < 2**32:
    yield f"config.seed: got {seed}, expected 0 to {2**32 - 1:,}."


def _length_errors(config: Config) -> Iterator[str]:
  if config.total_steps is not None:
    if config.total_steps < 1:
      yield f"config.total_steps: got {config.total_steps}, expected 1 or more."
    else:
      yield from warmup_errors(config, config.total_steps)
  elif config.total_epochs is None:
    yield (
      "config.total_steps: got None, and config.total_epochs is None, too; set"
      " one of them."
    )
  elif config.total_epochs <= 0:
    yield (
      f"config.total_epochs: got {config.total_epochs}, expected more than 0."
    )


def _range_errors(config: Config) -> Iterator[str]:
  counts = {
    "log_steps": config.log_steps,
    "checkpoint.keep_last": config.checkpoint.keep_last,
    "checkpoint.keep_every_steps": config.checkpoint.keep_every_steps,
    "data.shuffle_buffer": config.data.shuffle_buffer,
    "num_classes": config.num_classes,
    "heartbeat_timeout_seconds": config.heartbeat_timeout_seconds,
  }
  for key, value in counts.items():
    if value is not None and value < 1:
      yield f"config.{key}: got {value}, expected 1 or more."
  if config.watchdog_seconds < 0:
    yield (
      f"config.watchdog_seconds: got {config.watchdog_seconds:g}, expected"
      " seconds, or 0 for no limit."
    )
  if config.checkpoint.every_steps < 0:
    yield (
      f"config.checkpoint.every_steps: got {config.checkpoint.every_steps},"
      " expected 0 (only at the end) or more."
    )


def _batch_errors(config: Config) -> Iterator[str]:
  batch, micro = config.data.batch_size, config.optim.microbatch
  if batch < 1:
    yield f"config.data.batch_size: got {batch}, expected 1 or more."
  if config.data.repeats < 1:
    yield f"config.data.repeats: got {config.data.repeats}, expected 1 or more."
  if config.data.shrink < 0:
    yield (
      f"config.data.shrink: got {config.data.shrink}, expected a number of"
      " pixels, or 0 to shrink no image."
    )
  if micro is not None and micro < 1:
    yield (
      f"config.optim.microbatch: got {micro}, expected 1 or more images, or"
      " None for one microbatch."
    )


def _evaluator_errors(config: Config) -> Iterator[str]:
  cadences: dict[str, dict[str, int]] = {}
  for e in config.evals:
    yield from e.errors(f"config.evals.{e.name}")
    if e.group is not None:
      cadences.setdefault(e.group, {})[e.name] = e.every_steps
  names = [e.name for e in config.evals]
  for group, steps in cadences.items():
    if group in (*names, "train", "") or "/" in group:
      yield (
        f"config.evals.{next(iter(steps))}.group: got {group!r}, expected a"
        " name without '/' that is neither 'train' nor the name of an"
        " evaluator."
      )
    if len(set(steps.values())) > 1:
      got = ", ".join(f"{name} {every}" for name, every in steps.items())
      yield (
        f"config.evals.*.every_steps: got {got}, expected the same number for"
        f" all evaluators of the group {group!r}, whose mean is written."
      )


def _head_errors(config: Config) -> Iterator[str]:
  from vit_jax.losses import HEADS  # it imports jax

  objective = config.objective
  if objective.trains_head and objective.head_loss not in HEADS:
    yield (
      f"config.objective.kind: got {objective.kind!r} with the head_loss"
      f" {objective.head_loss!r}, expected one of {', '.join(HEADS)}, or"
      " trains_head = False."
    )
  for e in config.evals:
    if e.scores_head and not objective.trains_head:
      yield (
        f"config.evals.{e.name}.kind: got {e.kind!r}, which scores the logits"
        f" of a head, but config.objective.kind={objective.kind!r} trains no"
        " head; use a few-shot evaluator, or remove this one."
      )


def _init_errors(config: Config) -> Iterator[str]:
  if config.init_mean and not config.init:
    yield (
      f"config.init_mean: got {config.init_mean!r}, which describes the weights"
      " of config.init, but config.init is None; set both, or none."
    )
  if config.init_head == "zeros":
    return
  kinds = {e.name: e.kind for e in config.evals}
  if kinds.get(HELD_OUT) != "classification":
    yield (
      "config.init_head: got 'linear_probe', which needs held-out images with"
      " one class each; expected an evaluator `val` of kind 'classification',"
      " or the init_head 'zeros'."
    )
  if not isinstance(config.objective, Classification):
    yield (
      "config.init_head: got 'linear_probe' with config.objective.kind="
      f"{config.objective.kind!r}, expected the kind 'classification'."
    )


def _optim_errors(optim: OptimConfig) -> Iterator[str]:
  for key in ("warmup_steps", "end_lr", "weight_decay"):
    if getattr(optim, key) < 0:
      value = getattr(optim, key)
      yield f"config.optim.{key}: got {value}, expected 0 or more."
  for key in ("lr", "clip_norm"):
    value = getattr(optim, key)
    if value is not None and value <= 0:
      yield f"config.optim.{key}: got {value}, expected more than 0."
  for key in ("beta1", "beta2", "momentum", "ema_decay"):
    value = getattr(optim, key)
    if value is not None and not 0 <= value < ROUNDS_TO_ONE:
      yield f"config.optim.{key}: got {value}, expected 0 to below 1 (float32)."
  if optim.layer_decay is not None and not 0 < optim.layer_decay <= 1:
    yield (
      f"config.optim.layer_decay: got {optim.layer_decay}, expected None or a"
      " factor above 0 and up to 1, such as 0.75."
    )
  try:
    optim.lr_scales()
  except ValueError as e:
    yield f"config.optim.lr_scale: {e}"
  at = optim.decay_at
  if (optim.schedule == "step") != bool(at) or any(not 0 < s < 1 for s in at):
    yield (
      f"config.optim.decay_at: got {at} with config.optim.schedule="
      f"{optim.schedule!r}; 'step' expects shares of the run between 0 and 1,"
      " such as 0.3,0.6,0.9; other schedules expect none."
    )


def _unread_errors(optim: OptimConfig) -> Iterator[str]:
  """Yields the options that the chosen optimizer or schedule does not read."""
  for key, (selector, choices) in READ_BY.items():
    value, default = getattr(optim, key), getattr(OptimConfig, key)
    if value != default and (choice := getattr(optim, selector)) not in choices:
      yield (
        f"config.optim.{key}: got {shown(value)}, which"
        f" config.optim.{selector}={choice} does not use; leave it at"
        f" {default!r}."
      )


def _lora_errors(lora: LoRAConfig) -> Iterator[str]:
  if lora.rank < 0:
    yield f"config.lora.rank: got {lora.rank}, expected 0 (off) or more."
  if lora.alpha is not None and lora.alpha <= 0:
    yield f"config.lora.alpha: got {lora.alpha}, expected more than 0, or None."


def _mesh_errors(config: Config) -> Iterator[str]:
  axes = {k: getattr(config.mesh, k) for k in ("data", "fsdp", "tensor")}
  for key, value in axes.items():
    if value < 1 and value != -1:
      yield (
        f"config.mesh.{key}: got {value}, expected a number of devices, or -1"
        " for all remaining devices."
      )
  if axes["tensor"] == -1 and -1 in (axes["data"], axes["fsdp"]):
    yield (
      f"config.mesh: got {axes}, expected at most one -1, or data=-1 and"
      " fsdp=-1."
    )


def _image_errors(config: Config) -> Iterator[str]:
  sizes = {}
  ops = {"data.ops": config.data.ops}
  for e in config.evals:
    ops[f"evals.{e.name}.ops"] = e.ops
    if getattr(e, "train_ops", None) is not None:
      ops[f"evals.{e.name}.train_ops"] = e.train_ops
  for key, text in ops.items():
    try:
      sizes[key] = image_size(text)
      if key != "data.ops":  # a loader of the user's may make the images
        for_channels(text, config.model.channels)
    except ValueError as e:
      yield f"config.{key}: {e}"
  if "data.ops" not in sizes:
    return
  objective = config.objective
  for error in view_errors(objective.views(config.data.ops)):
    yield f"config.objective, kind={objective.kind!r}: {error}"
  want = sizes["data.ops"]
  for key, got in sizes.items():
    if got != want:
      yield (
        f"config.{key}: got images of {got[0]}x{got[1]} pixels, expected"
        f" {want[0]}x{want[1]}, the size of config.data.ops."
      )
  try:
    errors = list(config.model.size_errors(want))
  except ValueError:
    return  # a malformed variant, which `config.model.errors` reports
  yield from errors
  if not errors and not any(config.model.errors()):
    yield from config.objective.model_errors(config.model, want)

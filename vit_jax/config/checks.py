"""Checks of a config that need only the config; they return all errors.

Checks that need the machine or the disk (devices, data sets, weights) are in
`vit_jax.experiment`.
"""

from collections.abc import Iterator

from vit_jax.config import HELD_OUT, Config, OptimConfig
from vit_jax.config.schema import EACH, READ_BY
from vit_jax.data.preprocessing import (
  for_channels,
  image_size,
  view_errors,
)
from vit_jax.objectives import Classification
from vit_jax.options import limit_errors, shown, unexpected


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
    *limit_errors(config, "config"),
    *limit_errors(config.data, "config.data"),
    *limit_errors(config.checkpoint, "config.checkpoint"),
    *config.model.errors(),
    *limit_errors(config.objective, "config.objective"),
    *config.objective.errors(),
    *_head_errors(config),
    *_image_errors(config),
  ]


def option_errors(
  config: Config, is_training: bool = True, is_new: bool = True
) -> list[str]:
  """Returns errors of optimizer, evaluators, weights and mesh; see `errors`."""
  return [
    *(_optim_errors(config.optim) if is_training else ()),
    *(_unread_errors(config.optim) if is_training and is_new else ()),
    *(limit_errors(config.lora, "config.lora") if is_training else ()),
    *_evaluator_errors(config),
    *(_init_errors(config) if is_training else ()),
    *_mesh_errors(config),
    *(config.objective.start_errors(config.model) if is_new else ()),
  ]


def warmup_errors(config: Config, total_steps: int) -> list[str]:
  """Returns an error unless the warm-up ends before the run does."""
  warmup = config.optim.warmup_steps
  if warmup < total_steps:
    return []
  expected = f"fewer than the {total_steps} steps of the run"
  return [unexpected("config.optim.warmup_steps", warmup, expected)]


def _length_errors(config: Config) -> list[str]:
  if config.total_steps is not None:
    return warmup_errors(config, max(config.total_steps, 1))
  if config.total_epochs is None:
    expected = "a number, or config.total_epochs"
    return [unexpected("config.total_steps", None, expected)]
  return []


def _evaluator_errors(config: Config) -> Iterator[str]:
  cadences: dict[str, dict[str, int]] = {}
  for e in config.evals:
    yield from limit_errors(e, f"config.evals.{e.name}")
    yield from e.errors(f"config.evals.{e.name}")
    if e.group is not None:
      cadences.setdefault(e.group, {})[e.name] = e.every_steps
  names = [e.name for e in config.evals]
  for group, steps in cadences.items():
    if group in (*names, "train", "") or "/" in group:
      option = f"config.evals.{next(iter(steps))}.group"
      expected = "a name without '/', neither 'train' nor an evaluator's"
      yield unexpected(option, repr(group), expected)
    if len(set(steps.values())) > 1:
      got = ", ".join(f"{name} {every}" for name, every in steps.items())
      expected = f"one number for the group {group!r}, whose mean is written"
      yield unexpected("config.evals.*.every_steps", got, expected)


def _head_errors(config: Config) -> Iterator[str]:
  from vit_jax.losses import HEADS  # it imports jax

  objective = config.objective
  if objective.trains_head and objective.head_loss not in HEADS:
    got = f"{objective.kind!r} with the head_loss {objective.head_loss!r}"
    expected = f"one of {', '.join(HEADS)}, or trains_head = False"
    yield unexpected("config.objective.kind", got, expected)
  for e in config.evals:
    if e.scores_head and not objective.trains_head:
      expected = (
        f"a few-shot evaluator: config.objective.kind={objective.kind!r} trains"
        " no head"
      )
      yield unexpected(f"config.evals.{e.name}.kind", repr(e.kind), expected)


def _init_errors(config: Config) -> Iterator[str]:
  if config.init_mean and not config.init:
    expected = "None without config.init, whose weights it describes"
    yield unexpected("config.init_mean", repr(config.init_mean), expected)
  if config.init_head == "zeros":
    return
  kinds = {e.name: e.kind for e in config.evals}
  if kinds.get(HELD_OUT) != "classification":
    expected = f"'zeros' without an evaluator {HELD_OUT!r} of 'classification'"
    yield unexpected("config.init_head", repr(config.init_head), expected)
  if not isinstance(config.objective, Classification):
    got = f"{config.objective.kind!r} with config.init_head=linear_probe"
    yield unexpected("config.objective.kind", got, "'classification'")


def _optim_errors(optim: OptimConfig) -> Iterator[str]:
  yield from limit_errors(optim, "config.optim")
  try:
    optim.lr_scales()
  except ValueError as e:
    yield f"config.optim.lr_scale: {e}"
  try:
    optim.lr_zeros()
  except ValueError as e:
    yield f"config.optim.lr_zero: {e}"
  groups = optim.clip_groups
  if EACH in groups and len(groups) > 1:
    expected = f"patterns of parameters, or {EACH} alone"
    yield unexpected("config.optim.clip_groups", groups, expected)
  if groups and optim.clip_norm is None:
    expected = "a norm for config.optim.clip_groups"
    yield unexpected("config.optim.clip_norm", None, expected)
  at = optim.decay_at
  if (optim.schedule == "step") != bool(at) or any(not 0 < s < 1 for s in at):
    expected = (
      "shares of the run between 0 and 1, such as 0.3,0.6,0.9, for"
      " config.optim.schedule=step, and none for other schedules"
    )
    yield unexpected("config.optim.decay_at", at, expected)


def _unread_errors(optim: OptimConfig) -> Iterator[str]:
  """Yields the options that the chosen optimizer or schedule does not read."""
  for key, (selector, choices) in READ_BY.items():
    value, default = getattr(optim, key), getattr(OptimConfig, key)
    if value != default and (choice := getattr(optim, selector)) not in choices:
      expected = (
        f"{default!r}: config.optim.{selector}={choice} does not use it"
      )
      yield unexpected(f"config.optim.{key}", shown(value), expected)


def _mesh_errors(config: Config) -> Iterator[str]:
  mesh = config.mesh
  yield from limit_errors(mesh, "config.mesh")
  if mesh.tensor == -1 and -1 in (mesh.data, mesh.fsdp):
    yield unexpected("config.mesh.tensor", -1, "a number beside another -1")


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
      expected = f"{want[0]}x{want[1]}, the size of config.data.ops"
      images = f"images of {got[0]}x{got[1]} pixels"
      yield unexpected(f"config.{key}", images, expected)
  try:
    errors = list(config.model.size_errors(want))
  except ValueError:
    return  # a malformed variant, which `config.model.errors` reports
  yield from errors
  if not errors and not any(config.model.errors()):
    yield from config.objective.model_errors(config.model, want)

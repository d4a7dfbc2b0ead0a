"""What the words of a config alone show to be wrong, all at once.

What needs the machine or the disk (devices, data sets, weights) is looked at
by `vit_jax.runtime.prepare`.
"""

import dataclasses
from collections.abc import Iterator

from vit_jax.config import Config, ModelConfig, OptimConfig
from vit_jax.config.preprocessing import image_size
from vit_jax.families.geometry import feature_map, size, stages
from vit_jax.families.names import Stages

# Fields of ModelConfig that a ResNet does not read.
TRANSFORMER_ONLY = (
  "width depth mlp_dim num_heads pool posemb cls_row pre_logits gelu ln_eps"
  " dropout stochastic_depth scan"
).split()


def faults(config: Config, is_training: bool = True) -> list[str]:
  """Returns one text a fault: config key, got, expected, what to do.

  Args:
    config: The run.
    is_training: False leaves out its length and the optimizer.
  """
  training = [*_length_faults(config), *_optim_faults(config.optim)]
  return [
    *(training if is_training else ()),
    *_range_faults(config),
    *_batch_faults(config),
    *_evaluator_faults(config),
    *_mesh_faults(config),
    *_model_faults(config.model),
    *config.objective.faults(),
    *_image_faults(config),
  ]


def warmup_faults(config: Config, total_steps: int) -> list[str]:
  """The warm-up must end before the run does."""
  warmup = config.optim.warmup_steps
  if warmup < total_steps:
    return []
  return [
    f"config.optim.warmup_steps: got {warmup}, as long as the run of"
    f" {total_steps} steps or longer; set it to {total_steps // 10}, or make"
    " the run longer (config.total_steps, config.total_epochs)."
  ]


def _length_faults(config: Config) -> Iterator[str]:
  if config.total_steps is not None:
    if config.total_steps < 1:
      yield f"config.total_steps: got {config.total_steps}, expected 1 or more."
    else:
      yield from warmup_faults(config, config.total_steps)
  elif config.total_epochs is None:
    yield (
      "config.total_steps: got neither steps nor epochs; set it, or"
      " config.total_epochs."
    )
  elif config.total_epochs <= 0:
    yield (
      f"config.total_epochs: got {config.total_epochs}, expected more than 0."
    )


def _range_faults(config: Config) -> Iterator[str]:
  shares = {
    "model.dropout": config.model.dropout,
    "model.stochastic_depth": config.model.stochastic_depth,
  }
  for key, value in shares.items():
    if not 0 <= value < 1:
      yield f"config.{key}: got {value}, expected a share from 0 to below 1."
  counts = {
    "log_steps": config.log_steps,
    "checkpoint.keep_last": config.checkpoint.keep_last,
    "checkpoint.keep_every_steps": config.checkpoint.keep_every_steps,
    "data.shuffle_buffer": config.data.shuffle_buffer,
    "num_classes": config.num_classes,
  }
  for key, value in counts.items():
    if value is not None and value < 1:
      yield f"config.{key}: got {value}, expected 1 or more."
  if config.checkpoint.every_steps < 0:
    yield (
      f"config.checkpoint.every_steps: got {config.checkpoint.every_steps},"
      " expected 0 (only at the end) or more."
    )


def _batch_faults(config: Config) -> Iterator[str]:
  batch, micro = config.data.batch_size, config.optim.microbatch
  if batch < 1:
    yield f"config.data.batch_size: got {batch}, expected 1 or more."
  if micro is not None and micro < 1:
    yield (
      f"config.optim.microbatch: got {micro}, expected 1 or more images, or"
      " None for one microbatch."
    )


def _evaluator_faults(config: Config) -> Iterator[str]:
  for e in config.evals:
    yield from e.faults(f"config.evals.{e.name}")


def _optim_faults(optim: OptimConfig) -> Iterator[str]:
  for key in ("warmup_steps", "end_lr", "weight_decay"):
    if getattr(optim, key) < 0:
      value = getattr(optim, key)
      yield f"config.optim.{key}: got {value}, expected 0 or more."
  for key in ("lr", "eps", "rsqrt_timescale", "clip_norm"):
    value = getattr(optim, key)
    if value is not None and value <= 0:
      yield f"config.optim.{key}: got {value}, expected more than 0."
  for key in ("beta1", "beta2", "momentum", "ema_decay"):
    value = getattr(optim, key)
    if value is not None and not 0 <= value < 1:
      yield f"config.optim.{key}: got {value}, expected 0 to below 1."


def _mesh_faults(config: Config) -> Iterator[str]:
  axes = {k: getattr(config.mesh, k) for k in ("data", "fsdp", "tensor")}
  for key, value in axes.items():
    if value < 1 and value != -1:
      yield (
        f"config.mesh.{key}: got {value}, expected a number of devices, or -1"
        " for all that remain."
      )
  if axes["tensor"] == -1 and -1 in (axes["data"], axes["fsdp"]):
    yield (
      f"config.mesh: got {axes}, expected at most one -1, or data=-1 and"
      " fsdp=-1."
    )


def _model_faults(model: ModelConfig) -> Iterator[str]:
  try:
    found = stages(model)
    sizes = size(model)[0] if model.name == "vit" else None
  except ValueError as e:
    yield f"config.model.variant: {e}"
    return
  yield from _resnet_faults(model, found)
  if sizes is None:
    return
  for key in ("width", "depth", "mlp_dim", "num_heads"):
    if getattr(sizes, key) < 1:
      yield (
        f"config.model.{key}: got {getattr(sizes, key)}, expected 1 or more."
      )
      return
  if sizes.width % sizes.num_heads:
    yield (
      f"config.model.num_heads: got {sizes.num_heads}, which does not divide"
      f" the width of {sizes.width}; use a divisor of {sizes.width}."
    )
  if model.posemb == "sincos2d" and (sizes.width % 4 or sizes.width < 8):
    yield (
      f"config.model.width: got {sizes.width}, expected a multiple of 4, and"
      " at least 8, for config.model.posemb='sincos2d'."
    )
  if model.posemb == "learn2d" and sizes.width % 2:
    yield (
      f"config.model.width: got {sizes.width}, expected an even number for"
      " config.model.posemb='learn2d'."
    )


def _resnet_faults(model: ModelConfig, found: Stages | None) -> Iterator[str]:
  for key in ("ln_eps", "gn_eps", "ws_eps"):
    value = getattr(model, key)
    if value is not None and value <= 0:
      yield f"config.model.{key}: got {value}, expected more than 0."
  if model.name != "vit":  # what only a Transformer has
    for field in dataclasses.fields(ModelConfig):
      if field.name in TRANSFORMER_ONLY:
        value = getattr(model, field.name)
        if value != field.default:
          yield (
            f"config.model.{field.name}: got {value!r}, which a ResNet"
            f" (config.model.name={model.name!r}) has no use for; leave it at"
            f" {field.default!r}."
          )
    if model.remat == "dots":
      yield (
        "config.model.remat: got 'dots', expected none or full for a ResNet."
      )
  if found is None:
    for key in ("stage_blocks", "stage_width"):
      if getattr(model, key) is not None:
        yield (
          f"config.model.{key}: got {getattr(model, key)}, but"
          f" config.model.variant={model.variant!r} has no ResNet; expected"
          " None, or a variant such as R50+B/16."
        )
    return
  if any(n < 1 for n in found.blocks):
    yield (
      f"config.model.stage_blocks: got {found.blocks}, expected 1 or more each."
    )
  if round(64 * found.width) % 32 or found.width <= 0:
    yield (
      f"config.model.stage_width: got {found.width}, which makes the root"
      f" {64 * found.width:g} channels; expected a multiple of 0.5, since the"
      " norms have 32 groups."
    )


def _image_faults(config: Config) -> Iterator[str]:
  sizes = {}
  ops = {"data.ops": config.data.ops}
  ops |= {f"evals.{e.name}.ops": e.ops for e in config.evals}
  for key, text in ops.items():
    try:
      sizes[key] = image_size(text)
    except ValueError as e:
      yield f"config.{key}: {e}"
  want = sizes.get("data.ops")
  for key, got in sizes.items():
    if want and got != want:
      yield (
        f"config.{key}: got images of {got[0]}x{got[1]} pixels, expected"
        f" {want[0]}x{want[1]} as from config.data.ops."
      )
  if config.model.name != "vit" or not want:
    return
  try:
    _, patch = size(config.model)
    height, width = feature_map(config.model, want)
  except ValueError:
    return  # already reported
  if height % patch or width % patch:
    # Behind a ResNet a patch covers more pixels.
    patch = patch * want[0] // height if height else patch
    near = [max(1, round(s / patch)) * patch for s in want]
    yield (
      f"config.data.ops: got images of {want[0]}x{want[1]} pixels, which the"
      f" patch of {patch} (config.model.variant={config.model.variant!r}) does"
      f" not divide; use {near[0]}x{near[1]}, or another patch."
    )

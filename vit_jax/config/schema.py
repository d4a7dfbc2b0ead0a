"""Every option of a run: its type, its default, its unit.

A config file (`configs/*.py`) calls `defaults()`, sets what differs and
returns it; `freeze()` turns that into a `Config`, which is hashable and all
that the rest of the program sees. Faults are collected, never raised one by
one. Nothing here imports jax or TensorFlow, so that a misspelt option is
answered at once.
"""

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.objectives import OBJECTIVES, Classification, Objective
from vit_jax.options import (
  ConfigError,
  check_choice,
  nearest,
  option,
  parse_value,
)

if TYPE_CHECKING:  # needed to write a config file, not to read a frozen one
  import ml_collections


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The network."""

  name: str = option(
    "vit",
    "family: Transformers (hybrids, too), ResNets as BiT released them, and"
    " in the form that the hybrids have",
    ("vit", "bit", "bit_v1"),
  )
  variant: str = option(
    "B/16", "B/16 (Ti S B L H g G e So400m / pixels), R50+B/16, R50x1"
  )
  width: int | None = option(None, "width of a token; None: the variant's")
  depth: int | None = option(None, "number of blocks; None: the variant's")
  mlp_dim: int | None = option(
    None, "hidden width of the MLP; None: the variant's"
  )
  num_heads: int | None = option(
    None, "attention heads; None: the variant's; must divide the width"
  )
  stage_blocks: tuple[int, ...] | None = option(
    None, "units in each stage of the ResNet; None: the variant's"
  )
  stage_width: float | None = option(
    None, "factor of the ResNet's widths; None: the variant's"
  )
  pool: str = option(
    "token",
    "what the head sees: class token, mean over tokens, attention pooling",
    ("token", "gap", "map"),
  )
  posemb: str = option(
    "learn",
    "positions: a table, one of rows and one of columns, offsets in every"
    " attention, fixed sines, nothing",
    ("learn", "learn2d", "relative", "sincos2d", "none"),
  )
  cls_row: bool = option(
    True, "whether the learned table has a row for the class token, too"
  )
  pre_logits: bool = option(
    False, "tanh layer as wide as a token before the head"
  )
  gelu: str = option(
    "tanh",
    "form of GELU: Google's weights have tanh, those of PyTorch erf",
    ("tanh", "erf"),
  )
  ln_eps: float = option(
    1e-6, "added to LayerNorm's variance; Hugging Face has 1e-12"
  )
  gn_eps: float | None = option(
    None, "added to GroupNorm's variance; None: 1e-5 for bit, else 1e-6"
  )
  ws_eps: float | None = option(
    None,
    "added where kernels are standardised; None: 1e-10 for bit, else 1e-5",
  )
  ws_eps_on: str | None = option(
    None,
    "what ws_eps is added to; None: the variance for bit, else the deviation",
    ("var", "std"),
  )
  root_pad: str = option(
    "zero",
    "bit: what the root's maximum sees beyond the border, a zero as in BiT's"
    " own code, or nothing as in big_vision's",
    ("zero", "nothing"),
  )
  dropout: float = option(0.0, "share of activations dropped, 0 to 1")
  stochastic_depth: float = option(
    0.0, "share of branches dropped in the last block, 0 to 1; linear in depth"
  )
  head_bias: float = option(
    0.0, "initial bias of the head, logits; -10 suits sigmoid on many classes"
  )
  dtype: str = option(
    "float32", "type of the matrix products", ("float32", "bfloat16")
  )
  scan: bool = option(
    False, "scan over stacked blocks: compiles once for any depth"
  )
  remat: str = option(
    "none",
    "what the backward pass recomputes: nothing, all but products, blocks",
    ("none", "dots", "full"),
  )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The training data."""

  dataset: str = option(
    "imagenet2012", "TFDS name (cifar10, glyphs/...), or folder:/path"
  )
  split: str = option("train", "split to train on; slices as in train[:99%]")
  data_dir: str | None = option(
    None, "where TFDS data lie; None: $TFDS_DATA_DIR or ~/tensorflow_datasets"
  )
  ops: str = option(
    "decode_inception_crop(224)|flip_lr",
    "preprocessing of an image, operations separated by |",
  )
  batch_size: int = option(4096, "images per step, over all devices")
  shuffle_buffer: int = option(
    50_000,
    "encoded records held in memory to shuffle streamed files, over all"
    " processes; those of ImageNet take 110 kB each",
  )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimizer and its schedule."""

  name: str = option("adamw", "update rule", ("adamw", "sgd"))
  lr: float = option(1e-3, "peak learning rate, per step")
  schedule: str = option(
    "cosine",
    "learning rate after the warm-up",
    ("cosine", "linear", "rsqrt", "constant"),
  )
  warmup_steps: int = option(0, "steps of linear rise from 0 to lr")
  end_lr: float = option(
    0.0, "learning rate at the last step (cosine and linear)"
  )
  rsqrt_timescale: int = option(
    10_000, "steps over which rsqrt falls to 1/sqrt(2) of lr"
  )
  weight_decay: float = option(
    0.0, "decay of kernels per step, multiplied by the learning rate"
  )
  beta1: float = option(0.9, "adamw: decay of the first moment")
  beta2: float = option(0.999, "adamw: decay of the second moment")
  eps: float = option(1e-8, "adamw: added to the root of the second moment")
  momentum: float = option(0.9, "sgd: decay of the accumulator")
  accumulator_dtype: str = option(
    "float32",
    "type of sgd's accumulator and of adamw's first moment",
    ("float32", "bfloat16"),
  )
  clip_norm: float | None = option(
    None, "largest global norm of the gradient; None: no clipping"
  )
  microbatch: int | None = option(
    None,
    "most images of a microbatch, on each device, which sums the gradients of"
    " its microbatches; None: one microbatch",
  )
  ema_decay: float | None = option(
    None,
    "decay per step of the averaged parameters, to which it rises as"
    " (1 + step) / (10 + step); None: no average",
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How devices are arranged; the product is the number of devices."""

  data: int = option(-1, "copies of the model; -1: all remaining devices")
  fsdp: int = option(
    1,
    "devices that share the state, and split the batch; -1 beside data=-1: up"
    " to 16 that divide the devices",
  )
  tensor: int = option(1, "devices that split heads and hidden units")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the state is written, and what stays on disk."""

  every_steps: int = option(1000, "steps between checkpoints; 0: only the last")
  keep_last: int = option(1, "newest checkpoints kept")
  keep_every_steps: int | None = option(
    None, "checkpoints at multiples of this stay for good; None: none"
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  seed: int = option(0, "root of all randomness")
  total_steps: int | None = option(
    None, "length of the run in steps; None: total_epochs decides"
  )
  total_epochs: float | None = option(
    None, "length of the run in passes over data.split"
  )
  num_classes: int | None = option(
    None, "width of the head; None: as many as the data set has"
  )
  init: str | None = option(
    None, "weights to start from: anything that vit_jax.load reads"
  )
  log_steps: int = option(50, "steps between lines of metrics")
  fake_data: bool = option(
    False, "records made up in memory, shaped like those of the data set"
  )
  model: ModelConfig = ModelConfig()
  objective: Objective = Classification()
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  evals: tuple[EvaluatorConfig, ...] = ()


# Options with kinds of their own: the option that chooses, and kind -> class.
UNIONS = {"objective": ("kind", OBJECTIVES)}

# Options that have moved: old path -> new path.
RENAMED = {
  "loss": "objective.loss",
  "label_smoothing": "objective.label_smoothing",
}


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
  """Returns the config of an earlier version, as `to_dict` makes it now."""
  values = {**values}
  for old, new in RENAMED.items():
    if old in values:
      parent, leaf = new.split(".")
      values[parent] = {leaf: values.pop(old), **values.get(parent, {})}
  return values


def defaults() -> "ml_collections.ConfigDict":
  """Returns all options at their defaults, to set what differs.

  `evals` is empty; a config file assigns a dict of evaluators, e.g.
  `{"val": {"kind": "classification", "split": "test"}}`, whose unset options
  take the defaults of their kind.
  """
  import ml_collections

  config = ml_collections.ConfigDict(_as_dict(Config()), type_safe=True).lock()
  config.objective.unlock()  # other kinds have other options
  return config


def freeze(config: "ml_collections.ConfigDict | dict") -> Config:
  """Turns a config into its frozen form.

  Raises:
    ConfigError: All unknown or ill-typed options at once.
  """
  frozen, faults = build(config)
  if faults:
    raise ConfigError(faults)
  return frozen


def build(
  config: "ml_collections.ConfigDict | dict",
) -> tuple[Config, list[str]]:
  """As `freeze`, but returns the faults; a faulty option has its default."""
  faults: list[str] = []
  if not isinstance(config, dict):
    config = config.to_dict()
  return _build(Config, config, "config", faults), faults


def to_dict(config: Config | ModelConfig) -> dict[str, Any]:
  """Returns nested plain dicts, as JSON has them; `freeze` reads them back."""
  return _as_dict(config, plain=True)


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
  """Returns what `to_dict` made of a model; absent options have defaults.

  Raises:
    ConfigError: All unknown or ill-typed options at once.
  """
  faults: list[str] = []
  model = _build(ModelConfig, values, "config.model", faults)
  if faults:
    raise ConfigError(faults)
  return model


def _build(cls, values, where: str, faults: list[str]):
  if not isinstance(values, dict):
    faults.append(f"{where}: got {values!r}, expected options of its own.")
    return cls()
  fields = {f.name: f for f in dataclasses.fields(cls)}
  for key in values:
    if key in fields:
      continue
    if cls is Config and key in RENAMED:
      faults.append(f"config.{key}: is now config.{RENAMED[key]}; set that.")
    else:
      near = nearest(key, fields) or f" {where} has {', '.join(fields)}."
      faults.append(f"{where}.{key}: no such option.{near}")
  built = {}
  for name, field in fields.items():
    if name not in values:
      continue
    path, value = f"{where}.{name}", values[name]
    if name == "evals":
      built[name] = _build_evals(value, path, faults)
    elif name in UNIONS:
      built[name] = _build_kind(name, value, faults)
    elif dataclasses.is_dataclass(field.type):
      built[name] = _build(field.type, value, path, faults)
    else:
      try:
        built[name] = parse_value(field.type, value, path)
        check_choice(built[name], field.metadata.get("choices"), path)
      except ValueError as e:
        faults.append(str(e))
        built.pop(name, None)
  return cls(**built)


def _build_kind(name: str, values, faults: list[str]):
  """Builds one of the kinds that an option of `UNIONS` has to choose from.

  What only other kinds have is passed over at its default, since a config that
  began as another kind has it all.
  """
  selector, kinds = UNIONS[name]
  where, default = f"config.{name}", Config.__dataclass_fields__[name].default
  if not isinstance(values, dict):
    return _build(type(default), values, where, faults)
  kind = values.get(selector, getattr(default, selector))
  if kind not in kinds:
    faults.append(
      f"{where}.{selector}: got {kind!r}, expected one of {', '.join(kinds)}."
      + nearest(str(kind), kinds)
    )
    return default
  own = {f.name for f in dataclasses.fields(kinds[kind])}
  kept = {}
  for key, value in values.items():
    others = [
      field
      for cls in kinds.values()
      for field in dataclasses.fields(cls)
      if field.name == key and key not in own
    ]
    if not others:
      kept[key] = value
    elif all(value != f.default for f in others):
      faults.append(
        f"{where}.{key}: got {value!r}, which {kind} has no use for; leave it"
        f" at {others[0].default!r}."
      )
  return _build(kinds[kind], kept, where, faults)


def _build_evals(evals, where: str, faults: list[str]) -> tuple:
  built = []
  evals = {} if evals in (None, "", "None", "none", "{}") else evals
  if not isinstance(evals, dict):
    faults.append(f"{where}: got {evals!r}, expected evaluators by name.")
    return ()
  with_kind = [
    n for n, v in evals.items() if isinstance(v, dict) and "kind" in v
  ]
  for name, values in evals.items():
    path = f"{where}.{name}"
    if name not in with_kind:
      known = ", ".join(with_kind) or "none"
      faults.append(
        f"{path}: no such evaluator; those of this config: {known}."
        + nearest(name, with_kind)
      )
      continue
    kind = values["kind"]
    if kind not in EVALUATORS:
      faults.append(
        f"{path}.kind: got {kind!r}, expected one of {', '.join(EVALUATORS)}."
        + nearest(str(kind), EVALUATORS)
      )
      continue
    values = {**values, "name": name}
    built.append(_build(EVALUATORS[kind], values, path, faults))
  return tuple(built)


def _as_dict(config, plain: bool = False) -> dict[str, Any]:
  """Nested dicts; unless `plain`, None becomes a typed placeholder."""
  if not plain:
    import ml_collections

  out: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.name == "evals":
      named = {e.name: _as_dict(e, plain) for e in value}
      out["evals"] = (
        named
        if plain
        else ml_collections.config_dict.placeholder(object)
        if not named
        else named
      )
    elif dataclasses.is_dataclass(value):
      out[field.name] = _as_dict(value, plain)
    elif value is None and not plain:
      (kind,) = [t for t in typing.get_args(field.type) if t is not type(None)]
      kind = typing.get_origin(kind) or kind  # tuple, of tuple[int, ...]
      out[field.name] = ml_collections.config_dict.placeholder(kind)
    else:
      out[field.name] = list(value) if isinstance(value, tuple) else value
  return out

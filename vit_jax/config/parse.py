"""A frozen `Config` from a config file, from JSON or from a command line.

A config file (`configs/*.py`) calls `defaults()`, sets what differs and
returns it; `freeze()` turns that into a `Config`. All errors are reported at
once.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from vit_jax.config import preprocessing
from vit_jax.config.from_dict import from_dict
from vit_jax.config.schema import UNIONS, Config
from vit_jax.evaluators import EVALUATORS
from vit_jax.families import ModelConfig
from vit_jax.options import (
  ConfigError,
  check_choice,
  nearest,
  parse_value,
  shown,
)


def defaults() -> ml_collections.ConfigDict:
  """Returns all options at their defaults, to set what differs.

  `evals` is empty; a config file assigns a dict of evaluators, e.g.
  `{"val": {"kind": "classification", "split": "test"}}`, whose unset options
  take the defaults of their kind.
  """
  values = _with_placeholders(Config(), to_dict(Config()))
  options = Options(values, type_safe=True)
  for name in UNIONS:
    options[name] = Options(options[name], type_safe=True)
  return options.lock()


class Options(ml_collections.ConfigDict):
  """A ConfigDict that takes options of every kind, even if locked.

  So a config file turns a network of one family into one of another: it sets
  the name, and then the options.
  """

  def __setitem__(self, key, value):
    is_of_a_kind = any(
      self.get(selector) in kinds and _fields(kinds, key)
      for selector, kinds in UNIONS.values()
    )
    if is_of_a_kind and key not in self:
      with self.unlocked():
        super().__setitem__(key, value)
    else:
      super().__setitem__(key, value)


def freeze(config: ml_collections.ConfigDict | dict) -> Config:
  """Turns a config into its frozen form.

  Raises:
    ConfigError: All unknown or ill-typed options at once.
  """
  frozen, errors = build(config)
  if errors:
    raise ConfigError(errors)
  return frozen


def build(
  config: ml_collections.ConfigDict | dict,
) -> tuple[Config, list[str]]:
  """Returns a frozen config, and all errors; wrong options have defaults."""
  errors: list[str] = []
  if not isinstance(config, dict):
    config = config.to_dict()
  return _with_decoding(
    _build(Config, config, "config", errors), errors
  ), errors


def _with_decoding(config: Config, errors: list[str]) -> Config:
  """Puts what `data` says of decoding into the operations of all splits.

  So a run's evaluators, and those who take its preprocessing from its
  config.json, decode as its training does.
  """
  changes = {
    "background": config.data.background,
    "max_pixels": config.data.max_pixels,
  }
  try:
    preprocessing.check_decoding(**changes)
  except ValueError as e:
    errors.append(f"config.data.{e}")
    return config

  def changed(options):
    try:
      ops = preprocessing.with_decoding(options.ops, **changes)
    except ValueError:  # reported where operations are checked
      return options
    return dataclasses.replace(options, ops=ops)

  return dataclasses.replace(
    config,
    data=changed(config.data),
    evals=tuple(changed(e) if hasattr(e, "ops") else e for e in config.evals),
  )


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a `Config`, or a part of one, as JSON has it; `freeze` reads it."""
  values: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.name == "evals":
      value = {e.name: to_dict(e) for e in value}
    elif dataclasses.is_dataclass(value):
      value = to_dict(value)
    elif isinstance(value, tuple):
      value = list(value)
    values[field.name] = value
  return values


def _with_placeholders(config, values: dict[str, Any]) -> dict[str, Any]:
  """Puts placeholders, which have a type, into `to_dict(config)` for None."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.name == "evals":
      kind = object
    elif value is None:
      (kind,) = {*typing.get_args(field.type)} - {type(None)}
      kind = typing.get_origin(kind) or kind  # tuple[int, ...] -> tuple
    else:
      if dataclasses.is_dataclass(value):
        _with_placeholders(value, values[field.name])
      continue
    values[field.name] = ml_collections.config_dict.placeholder(kind)
  return values


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns nested options by their paths.

  Example:
    >>> flat({"optim": {"lr": 0.5}, "evals": {}})
    {'optim.lr': 0.5, 'evals': {}}
  """
  options = {}
  for key, value in values.items():
    if isinstance(value, dict) and value:
      options |= flat(value, f"{prefix}{key}.")
    else:
      options[prefix + key] = value
  return options


def options_of(values: dict[str, Any]) -> dict[str, Any]:
  """Returns every option of a config.json by its path.

  Options that the file lacks have their defaults; unknown ones stay.
  """
  return flat(to_dict(build(values)[0])) | flat(values)


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
  """Returns the model of which `to_dict` made the values.

  Absent options have their defaults.

  Raises:
    ConfigError: All unknown or ill-typed options at once.
  """
  errors: list[str] = []
  model = _build_kind(values, "config.model", errors)
  if errors:
    raise ConfigError(errors)
  return model


def _build(cls, values, where: str, errors: list[str]):
  readers = {name: _build_kind for name in UNIONS}
  readers["evals"] = _build_evals
  return from_dict(cls, values, where, errors, readers=readers)


def _build_kind(values, where: str, errors: list[str]):
  """Builds the kind that an option of `UNIONS` chooses.

  A config that switches to another kind still has the options of the first.
  They are ignored while they have their defaults.
  """
  name = where.removeprefix("config.")
  selector, kinds = UNIONS[name]
  default = Config.__dataclass_fields__[name].default
  if not isinstance(values, dict):
    return _build(type(default), values, where, errors)
  kind = str(values.get(selector, getattr(default, selector)))
  try:
    check_choice(kind, kinds, f"{where}.{selector}")
  except ValueError as e:
    errors.append(str(e))
    return default
  own = {field.name for field in dataclasses.fields(kinds[kind])}
  options = {}
  for key, value in values.items():
    others = [] if key in own else _fields(kinds, key)
    if not others:  # an option of this kind, or an unknown one
      options[key] = value
    elif not any(_is_default(field, value) for field in others):
      errors.append(
        f"{where}.{key}: got {shown(value)}, which {where}.{selector}={kind}"
        f" has no use for; leave it at {others[0].default!r}."
      )
  return _build(kinds[kind], options, where, errors)


def _fields(kinds: Mapping[str, type], key: str) -> list[dataclasses.Field]:
  """Returns the field of an option in each of the kinds that have it."""
  fields = (f for cls in kinds.values() for f in dataclasses.fields(cls))
  return [field for field in fields if field.name == key]


def _is_default(field: dataclasses.Field, value) -> bool:
  """Whether a value, maybe a text, is the default of a field."""
  try:
    return parse_value(field.type, value, field.name) == field.default
  except ValueError:
    return False


def _build_evals(evals, where: str, errors: list[str]) -> tuple:
  evaluators = []
  evals = {} if evals in (None, "", "None", "none", "{}") else evals
  if not isinstance(evals, dict):
    errors.append(f"{where}: got {shown(evals)}, expected evaluators by name.")
    return ()
  known = [k for k, v in evals.items() if isinstance(v, dict) and "kind" in v]
  for name, values in evals.items():
    path = f"{where}.{name}"
    if name not in known:
      listed = ", ".join(known) or "none"
      errors.append(
        f"{path}: no such evaluator; those of this config: {listed}."
        + nearest(name, known)
      )
      continue
    kind = str(values["kind"])
    try:
      check_choice(kind, EVALUATORS, f"{path}.kind")
    except ValueError as e:
      errors.append(str(e))
      continue
    values = {**values, "name": name}
    evaluators.append(_build(EVALUATORS[kind], values, path, errors))
  return tuple(evaluators)

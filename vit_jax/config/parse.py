"""Makes a frozen `Config` from a config file, JSON or a command line.

A config file (`configs/*.py`) calls `defaults()`, changes options and returns
the result; `freeze()` turns it into a `Config`. All errors are reported at
once.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from vit_jax import names
from vit_jax.config.schema import UNIONS, Config
from vit_jax.data.operation import check_decoding
from vit_jax.data.preprocessing import with_decoding
from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.families import ModelConfig
from vit_jax.options import (
  ConfigError,
  check_choice,
  nearest,
  parse_value,
  shown,
  unexpected,
)

T = TypeVar("T")
_NOTHING: Mapping = MappingProxyType({})


class Options(dict):
  """The options that a config file changes, by attribute or by key.

  It contains what was set. Another option reads as its default, in `model` and
  `objective` the default of the kind that is chosen at that moment. `build`
  checks names and types, all at once.
  """

  section: str | None = None  # of Config; "": Config itself; None: any names

  def __init__(self, values: Mapping = _NOTHING, section=None):
    super().__init__()
    self.__dict__["section"] = section
    self.update(values)

  def __missing__(self, key: str) -> Any:
    fields = self._known()
    if key not in fields:
      raise KeyError(f"no option {key!r}.{nearest(key, fields or self)}")
    if self.section == "" and not fields[key].metadata:  # a section
      self[key] = {}
      return self[key]
    return fields[key].default

  def _known(self) -> dict[str, dataclasses.Field]:
    """Returns the options that have a default."""
    if not self.section:
      return {} if self.section is None else _fields(Config)
    if self.section in UNIONS:
      return _fields(kind_of(self.section, chosen(self.section, self)))
    return _fields(Config.__dataclass_fields__[self.section].type)

  def __setitem__(self, key: str, value: Any) -> None:
    if type(value) is dict:
      is_section = self.section == "" and key != "evals"
      value = Options(value, key if is_section else None)
    super().__setitem__(key, value)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):  # pickle and copy ask for methods
      raise AttributeError(name)
    try:
      return self[name]
    except KeyError as e:
      raise AttributeError(*e.args) from None

  def __delattr__(self, name: str) -> None:
    del self[name]

  __setattr__ = __setitem__

  def update(self, values: Mapping = _NOTHING, **options) -> None:
    """Sets options; those of a section are added to what was set there."""
    for key, value in {**values, **options}.items():
      if isinstance(value, dict) and isinstance(self.get(key), Options):
        self[key].update(value)
      else:
        self[key] = value


def defaults() -> Options:
  """Returns options with their default values, for a config file to change.

  `evals` is empty. A config file assigns a dict of evaluators, such as
  `{"val": {"kind": "classification", "split": "test"}}`; absent options have
  the defaults of their kind.
  """
  return Options(section="")


def chosen(section: str, values: Mapping) -> str:
  """Returns the kind that the options of a section of `UNIONS` choose."""
  selector, _ = UNIONS[section]
  return str(values.get(selector, getattr(getattr(Config, section), selector)))


def kind_of(section: str, kind: str) -> type:
  """Returns the class of a kind of a section of `UNIONS`.

  Args:
    section: "model" or "objective".
    kind: A short name or an import path.

  Raises:
    ValueError: There is no such kind, or it cannot be imported.
  """
  selector, kinds = UNIONS[section]
  base = Config.__dataclass_fields__[section].type
  return names.resolve(kind, kinds, f"config.{section}.{selector}", base)


def without_defaults(section: str, values: dict[str, Any]) -> dict[str, Any]:
  """Returns the options of a section that differ from their kind's defaults.

  Another kind may then be chosen, whose defaults may be others.

  Args:
    section: "model" or "objective".
    values: Options of the section.
  """
  try:
    fields = _fields(kind_of(section, chosen(section, values)))
  except ValueError:  # `build` reports it
    return values
  return {
    key: value
    for key, value in values.items()
    if key not in fields or not _is_default(fields[key], value)
  }


def freeze(config: dict[str, Any]) -> Config:
  """Returns the options of a config file, or of JSON, as a `Config`.

  Raises:
    ConfigError: Options are unknown or have wrong types; it lists all of them.
  """
  frozen, errors = build(config)
  if errors:
    raise ConfigError(errors)
  return frozen


def build(config: dict[str, Any]) -> tuple[Config, list[str]]:
  """Returns a `Config` and all errors; wrong options have their defaults."""
  errors: list[str] = []
  built = _build(Config, config, "config", errors)
  return _with_decoding(built, errors), errors


def _with_decoding(config: Config, errors: list[str]) -> Config:
  """Copies `data.background` and `data.max_pixels` into all operations.

  Therefore evaluators, and programs that read the preprocessing in config.json,
  decode images as in training.
  """
  changes = config.data.decoding
  try:
    check_decoding(**changes)
  except ValueError as e:
    errors.append(f"config.data.{e}")
    return config

  def changed(options):
    texts = {}
    for name in ("ops", "train_ops"):
      if text := getattr(options, name, None):
        # The check of operations reports an error.
        with contextlib.suppress(ValueError):
          texts[name] = with_decoding(text, **changes)
    return dataclasses.replace(options, **texts)

  return dataclasses.replace(
    config,
    data=changed(config.data),
    evals=tuple(map(changed, config.evals)),
  )


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a `Config`, or a part of it, as JSON values for `freeze`."""
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


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns path -> value of nested options.

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
  """Returns path -> value of every option of a config.json.

  Absent options have their defaults; unknown options are kept.
  """
  return flat(to_dict(build(values)[0])) | flat(values)


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
  """Returns the options of a model from the values that `to_dict` made.

  Absent options have their defaults.

  Raises:
    ConfigError: Options are unknown or have wrong types; it lists all of them.
  """
  errors: list[str] = []
  model = _build_kind(values, "config.model", errors)
  if errors:
    raise ConfigError(errors)
  return model


def _fields(cls: type) -> dict[str, dataclasses.Field]:
  return {field.name: field for field in dataclasses.fields(cls)}


def _build(cls: type[T], values: Any, where: str, errors: list[str]) -> T:
  """Builds a dataclass of options; adds a message for each wrong one."""
  if not isinstance(values, dict):
    errors.append(unexpected(where, shown(values), "options by name"))
    return cls()
  fields = _fields(cls)
  for key in [key for key in values if key not in fields]:
    near = nearest(key, fields) or f" {where} has {', '.join(fields)}."
    errors.append(f"{where}.{key}: no such option.{near}")
  read = {}
  for key, field in fields.items():
    if key not in values:
      continue
    value, path = values[key], f"{where}.{key}"
    if cls is Config and not field.metadata:  # a section
      build_section = functools.partial(_build, field.type)
      if key in UNIONS:
        build_section = _build_kind
      elif key == "evals":
        build_section = _build_evals
      read[key] = build_section(value, path, errors)
      continue
    try:
      parsed = parse_value(field.type, value, path)
      chosen = parsed if isinstance(parsed, tuple) else (parsed,)
      if field.metadata.get("is_open"):
        chosen = tuple(v for v in chosen if v is None or not names.is_path(v))
      check_choice(chosen, field.metadata.get("choices"), path)
      read[key] = parsed
    except ValueError as e:
      errors.append(str(e))
  return cls(**read)


def _build_kind(values, where: str, errors: list[str]):
  """Builds the kind that an option of `UNIONS` chooses.

  An option that only other kinds have is ignored if it has its default: so a
  command line can take back what a config file set.
  """
  name = where.removeprefix("config.")
  selector, kinds = UNIONS[name]
  default = Config.__dataclass_fields__[name].default
  if not isinstance(values, dict):
    return _build(type(default), values, where, errors)
  kind = chosen(name, values)
  try:
    cls = kind_of(name, kind)
  except ValueError as e:
    errors.append(str(e))
    return default
  own, options = _fields(cls), {}
  for key, value in values.items():
    defaults = [
      fields[key] for fields in map(_fields, kinds.values()) if key in fields
    ]
    if key in own or not defaults:  # of this kind, or unknown
      options[key] = value
    elif not any(_is_default(field, value) for field in defaults):
      expected = f"{defaults[0].default!r} for {where}.{selector}={kind}"
      errors.append(unexpected(f"{where}.{key}", shown(value), expected))
  return _build(cls, options, where, errors)


def _is_default(field: dataclasses.Field, value) -> bool:
  """Whether a value, which may be text, is the default of a field."""
  try:
    return parse_value(field.type, value, field.name) == field.default
  except ValueError:
    return False


def _build_evals(evals, where: str, errors: list[str]) -> tuple:
  evaluators = []
  evals = {} if evals in (None, "", "None", "none", "{}") else evals
  if not isinstance(evals, dict):
    errors.append(unexpected(where, shown(evals), "evaluators by name"))
    return ()
  known = [k for k, v in evals.items() if isinstance(v, dict) and "kind" in v]
  for name, values in evals.items():
    path = f"{where}.{name}"
    if name not in known:
      errors.append(f"{path}: no such evaluator.{nearest(name, known)}")
      continue
    kind = str(values["kind"])
    try:
      cls = names.resolve(kind, EVALUATORS, f"{path}.kind", EvaluatorConfig)
    except ValueError as e:
      errors.append(str(e))
      continue
    values = {**values, "name": name}
    evaluators.append(_build(cls, values, path, errors))
  return tuple(evaluators)

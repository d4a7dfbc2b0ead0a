"""Makes a frozen `Config` from a config file, JSON or a command line.

A config file (`configs/*.py`) calls `defaults()`, changes options and returns
the result; `freeze()` turns it into a `Config`. All errors are reported at
once.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from vit_jax import names
from vit_jax.config import preprocessing
from vit_jax.config.from_dict import from_dict
from vit_jax.config.schema import UNIONS, Config
from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.families import ModelConfig
from vit_jax.options import (
  ConfigError,
  nearest,
  parse_value,
  shown,
)


def defaults() -> ml_collections.ConfigDict:
  """Returns all options with their default values; a config file changes some.

  `evals` is empty. A config file assigns a dict of evaluators, such as
  `{"val": {"kind": "classification", "split": "test"}}`; absent options have
  the defaults of their kind.
  """
  values = _with_placeholders(Config(), to_dict(Config()))
  options = Options(values, type_safe=True)
  for name in UNIONS:
    options[name] = Options(options[name], type_safe=True)
  return options.lock()


class Options(ml_collections.ConfigDict):
  """A ConfigDict; a section of `UNIONS` takes the options of every kind.

  Therefore a config file can change the family of the model, although the
  ConfigDict is locked: it sets `name`, then the options of the new family.
  """

  def __setitem__(self, key, value):
    section = next((s for s, (k, _) in UNIONS.items() if k in self), None)
    if section and key == UNIONS[section][0]:
      with self.unlocked():
        switch(self, section, value)
    with contextlib.ExitStack() as stack:
      if section and self.is_locked and key not in self:
        if _takes(section, self[UNIONS[section][0]], key):
          stack.enter_context(self.unlocked())
      super().__setitem__(key, value)


def _takes(section: str, kind: str, key: str) -> bool:
  """Whether a config file may add an option to a section.

  Raises:
    ValueError: The kind is an import path that cannot be imported.
  """
  kinds = UNIONS[section][1]
  if names.is_path(kind):
    kinds = {**kinds, kind: kind_of(section, kind)}
  return kind in kinds and bool(_fields(kinds, key))


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


def switch(values, section: str, kind: str) -> None:
  """Prepares the options of a section for a change to or from one's own kind.

  Options that have the default of the present kind are removed if the new kind
  lacks them or has another default. So no default of one kind becomes a value
  of another. (The kinds of vit_jax agree about the defaults, or the new kind
  refuses the old one.)

  Args:
    values: The options of the section, changed.
    section: "model" or "objective".
    kind: The new kind.
  """
  selector, _ = UNIONS[section]
  present = values.get(selector, getattr(getattr(Config, section), selector))
  if not any(names.is_path(str(k)) for k in (present, kind)):
    return
  try:
    old, new = kind_of(section, present), kind_of(section, kind)
  except ValueError:  # `build` reports it
    return
  defaults = {f.name: f.default for f in dataclasses.fields(new)}
  for field in dataclasses.fields(old):
    key, is_same = field.name, defaults.get(field.name) == field.default
    if key in values and key != selector and not is_same:
      if _is_default(field, values[key]):
        del values[key]


def freeze(config: ml_collections.ConfigDict | dict) -> Config:
  """Returns the frozen form of a config.

  Raises:
    ConfigError: Options are unknown or have wrong types; it lists all of them.
  """
  frozen, errors = build(config)
  if errors:
    raise ConfigError(errors)
  return frozen


def build(
  config: ml_collections.ConfigDict | dict,
) -> tuple[Config, list[str]]:
  """Returns a frozen config and all errors; wrong options have defaults."""
  errors: list[str] = []
  if not isinstance(config, dict):
    config = config.to_dict()
  return _with_decoding(
    _build(Config, config, "config", errors), errors
  ), errors


def _with_decoding(config: Config, errors: list[str]) -> Config:
  """Copies `data.background` and `data.max_pixels` into all operations.

  Therefore evaluators, and programs that read the preprocessing in config.json,
  decode images as in training.
  """
  changes = config.data.decoding
  try:
    preprocessing.check_decoding(**changes)
  except ValueError as e:
    errors.append(f"config.data.{e}")
    return config

  def changed(options):
    texts = {}
    for name in ("ops", "train_ops"):
      if text := getattr(options, name, None):
        # The check of operations reports an error.
        with contextlib.suppress(ValueError):
          texts[name] = preprocessing.with_decoding(text, **changes)
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


def _with_placeholders(config, values: dict[str, Any]) -> dict[str, Any]:
  """Replaces None in `to_dict(config)` by placeholders, which have a type."""
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


def _build(cls, values, where: str, errors: list[str]):
  readers = {name: _build_kind for name in UNIONS}
  readers["evals"] = _build_evals
  return from_dict(cls, values, where, errors, readers=readers)


def _build_kind(values, where: str, errors: list[str]):
  """Builds the kind that an option of `UNIONS` chooses.

  A config that switches to another kind still has the options of the first
  kind, which are ignored if they have their defaults.
  """
  name = where.removeprefix("config.")
  selector, kinds = UNIONS[name]
  default = Config.__dataclass_fields__[name].default
  if not isinstance(values, dict):
    return _build(type(default), values, where, errors)
  kind = str(values.get(selector, getattr(default, selector)))
  try:
    cls = kind_of(name, kind)
  except ValueError as e:
    errors.append(str(e))
    return default
  own = {field.name for field in dataclasses.fields(cls)}
  options = {}
  for key, value in values.items():
    others = [] if key in own else _fields(kinds, key)
    if not others:  # an option of this kind, or an unknown one
      options[key] = value
    elif not any(_is_default(field, value) for field in others):
      errors.append(
        f"{where}.{key}: got {shown(value)}, which {where}.{selector}={kind}"
        f" does not use; leave it at {others[0].default!r}."
      )
  return _build(cls, options, where, errors)


def _fields(kinds: Mapping[str, type], key: str) -> list[dataclasses.Field]:
  """Returns the field of an option in each kind that has it."""
  fields = (f for cls in kinds.values() for f in dataclasses.fields(cls))
  return [field for field in fields if field.name == key]


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
    errors.append(f"{where}: got {shown(evals)}, expected evaluators by name.")
    return ()
  known = [k for k, v in evals.items() if isinstance(v, dict) and "kind" in v]
  for name, values in evals.items():
    path = f"{where}.{name}"
    if name not in known:
      listed = ", ".join(known) or "none"
      errors.append(
        f"{path}: no such evaluator; this config has: {listed}."
        + nearest(name, known)
      )
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

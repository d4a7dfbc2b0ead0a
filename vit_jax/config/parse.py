"""From a config file, or the text of a command line, to a frozen `Config`.

A config file (`configs/*.py`) calls `defaults()`, sets what differs and
returns it; `freeze()` turns that into a `Config`. Faults are collected, never
raised one by one.
"""

import dataclasses
import functools
import typing
from typing import TYPE_CHECKING, Any

from vit_jax.config.from_dict import from_dict
from vit_jax.config.schema import UNIONS, Config
from vit_jax.evaluators import EVALUATORS
from vit_jax.families import ModelConfig
from vit_jax.options import (
  ConfigError,
  nearest,
  parse_value,
  shown,
)

if TYPE_CHECKING:  # needed to write a config file, not to read a frozen one
  import ml_collections


def defaults() -> "ml_collections.ConfigDict":
  """Returns all options at their defaults, to set what differs.

  `evals` is empty; a config file assigns a dict of evaluators, e.g.
  `{"val": {"kind": "classification", "split": "test"}}`, whose unset options
  take the defaults of their kind.
  """
  return _restored(_as_dict(Config()), is_locked=True)


@functools.cache
def _options_class():
  """Returns a ConfigDict that, locked, takes the options of any kind.

  A config file turns a network of one family into one of another by setting its
  name, and then its options.
  """
  import ml_collections

  class Options(ml_collections.ConfigDict):
    def __setitem__(self, key, value):
      is_of_a_kind = any(
        self.get(selector) in kinds and _defaults(kinds.values(), key)
        for selector, kinds in UNIONS.values()
      )
      if is_of_a_kind and key not in self:
        with self.unlocked():
          super().__setitem__(key, value)
      else:
        super().__setitem__(key, value)

    def __reduce__(self):  # a local class cannot be pickled by its name
      return _restored, (self.to_dict(), self.is_locked)

  return Options


def _restored(values: dict[str, Any], is_locked: bool):
  cls = _options_class()
  options = cls(values, type_safe=True)
  for name in UNIONS:
    if name in options:
      options[name] = cls(options[name], type_safe=True)
  return options.lock() if is_locked else options


def freeze(config: "ml_collections.ConfigDict | dict") -> Config:
  """Turns a config into its frozen form.

  Raises:
    ConfigError: All unknown or ill-typed options at once.
  """
  frozen, errors = build(config)
  if errors:
    raise ConfigError(errors)
  return frozen


def build(
  config: "ml_collections.ConfigDict | dict",
) -> tuple[Config, list[str]]:
  """Does as `freeze`, but returns the faults; faulty options get defaults."""
  errors: list[str] = []
  if not isinstance(config, dict):
    config = config.to_dict()
  return _build(Config, config, "config", errors), errors


def to_dict(config: Config | ModelConfig) -> dict[str, Any]:
  """Returns nested plain dicts, as JSON has them; `freeze` reads them back."""
  return _as_dict(config, plain=True)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns nested options by their paths.

  Example:
    >>> flat({"optim": {"lr": 0.5}, "evals": {}})
    {'optim.lr': 0.5, 'evals': {}}
  """
  found = {}
  for key, value in values.items():
    if isinstance(value, dict) and value:
      found |= flat(value, f"{prefix}{key}.")
    else:
      found[prefix + key] = value
  return found


def options_of(values: dict[str, Any]) -> dict[str, Any]:
  """Returns every option of a config.json by its path.

  Options that the file lacks have their defaults; unknown ones stay.
  """
  return flat(to_dict(build(values)[0])) | flat(values)


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
  """Returns what `to_dict` made of a model; absent options have defaults.

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
  """Builds one of the kinds that an option of `UNIONS` has to choose from.

  Options of other kinds are ignored at their defaults, since a config that
  began as another kind has them all.
  """
  name = where.removeprefix("config.")
  selector, kinds = UNIONS[name]
  default = Config.__dataclass_fields__[name].default
  if not isinstance(values, dict):
    return _build(type(default), values, where, errors)
  kind = values.get(selector, getattr(default, selector))
  if not isinstance(kind, str) or kind not in kinds:
    errors.append(
      f"{where}.{selector}: got {shown(kind)}, expected one of"
      f" {', '.join(kinds)}." + nearest(str(kind), kinds)
    )
    return default
  kept = _own(name, values)
  own = {f.name for f in dataclasses.fields(kinds[kind])}
  for key in [k for k in kept if k not in own]:
    if defaults_of_others := _defaults(kinds.values(), key):
      errors.append(
        f"{where}.{key}: got {shown(kept.pop(key))}, which"
        f" {where}.{selector}={kind} has no use for; leave it at"
        f" {defaults_of_others[0]!r}."
      )
  return _build(kinds[kind], kept, where, errors)


def _own(name: str, values: dict[str, Any]) -> dict[str, Any]:
  """Returns the options without those of other kinds at their defaults."""
  selector, kinds = UNIONS[name]
  kind = values.get(selector, next(iter(kinds)))
  is_known = isinstance(kind, str) and kind in kinds
  if not is_known:
    return values
  own = {f.name for f in dataclasses.fields(kinds[kind])}
  return {
    key: value
    for key, value in values.items()
    if key in own or not _is_default(kinds.values(), key, value)
  }


def _is_default(classes, key: str, value) -> bool:
  """Whether a value, maybe a text, is the default that some class has."""
  for cls in classes:
    field = cls.__dataclass_fields__.get(key)
    try:
      if field and parse_value(field.type, value, key) == field.default:
        return True
    except ValueError:
      pass
  return False


def _defaults(classes, key: str) -> list[Any]:
  """Returns the defaults that an option has in those classes that have it."""
  fields = (f for cls in classes for f in dataclasses.fields(cls))
  return [f.default for f in fields if f.name == key]


def _build_evals(evals, where: str, errors: list[str]) -> tuple:
  built = []
  evals = {} if evals in (None, "", "None", "none", "{}") else evals
  if not isinstance(evals, dict):
    errors.append(f"{where}: got {shown(evals)}, expected evaluators by name.")
    return ()
  with_kind = [
    n for n, v in evals.items() if isinstance(v, dict) and "kind" in v
  ]
  for name, values in evals.items():
    path = f"{where}.{name}"
    if name not in with_kind:
      known = ", ".join(with_kind)[:500] or "none"
      errors.append(
        f"{path[:200]}: no such evaluator; those of this config: {known}."
        + nearest(name, with_kind)
      )
      continue
    kind = values["kind"]
    if not isinstance(kind, str) or kind not in EVALUATORS:
      errors.append(
        f"{path[:200]}.kind: got {shown(kind)}, expected one of"
        f" {', '.join(EVALUATORS)}." + nearest(str(kind), EVALUATORS)
      )
      continue
    values = {**values, "name": name}
    built.append(_build(EVALUATORS[kind], values, path, errors))
  return tuple(built)


def _as_dict(config, plain: bool = False) -> dict[str, Any]:
  """Returns nested dicts; unless `plain`, None becomes a typed placeholder."""
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

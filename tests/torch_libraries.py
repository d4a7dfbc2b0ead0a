"""Imports timm and transformers, also if torchvision is broken or absent.

A torchvision that was built for another torch raises on import ("operator
torchvision::nms does not exist"), for example PyPI's torchvision with a CPU
build of torch. The compared and timed models do not use torchvision.
"""

import importlib
import sys
import types

# Names that timm imports for data sets, augmentations, feature extraction and
# one kind of normalisation.
MODULES = (
  "torchvision",
  "torchvision.datasets",
  "torchvision.models",
  "torchvision.models.feature_extraction",
  "torchvision.ops",
  "torchvision.ops.misc",
  "torchvision.transforms",
  "torchvision.transforms.functional",
)


def load(name: str) -> types.ModuleType:
  """Imports a library that imports torchvision.

  A torchvision that works is left alone. Any other is hidden from the process:
  transformers then does without. timm cannot; while it is imported, every name
  in torchvision is a class that has no instances and raises when it is called.

  Args:
    name: Name of the library, or of a module of it, such as "timm.layers".

  Raises:
    ImportError: The library itself is not installed.
  """
  library = name.split(".")[0]
  if torchvision_works() or library != "timm" or library in sys.modules:
    return importlib.import_module(name)
  sys.modules.update((m, _Module(m)) for m in MODULES)
  try:
    return importlib.import_module(name)
  finally:
    _hide()


class Later:
  """A library that `load` imports when something of it is used first."""

  def __init__(self, name: str) -> None:
    self._name = name

  def __getattr__(self, attribute: str):
    return getattr(load(self._name), attribute)


def torchvision_works() -> bool:
  """Whether torchvision can be imported; otherwise it is hidden."""
  if sys.modules.get("torchvision", "") is None:
    return False  # hidden before
  try:
    importlib.import_module("torchvision")
  except Exception:  # absent, or built for another torch
    _hide()
    return False
  return True


def _hide() -> None:
  for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
    del sys.modules[module]
  # Imports of it raise ModuleNotFoundError, and find_spec finds nothing.
  sys.modules["torchvision"] = None


class _Names(type):
  """The type of a class that has every attribute, except those of Python."""

  def __getattr__(cls, name):
    if name.startswith("__"):
      raise AttributeError(name)
    placeholder = _Names(name, (_Placeholder,), {})  # of each name another
    setattr(cls, name, placeholder)
    return placeholder

  def __call__(cls, *_, **__):
    raise ImportError(
      "torchvision: absent, or built for another torch, and something needs it;"
      " install the torchvision of this torch."
    )


class _Placeholder(metaclass=_Names):
  """Replaces everything in torchvision."""


class _Module(types.ModuleType):
  """A module with every name."""

  __path__ = ()  # its parts are imported by name

  def __getattr__(self, name):
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(_Placeholder, name)

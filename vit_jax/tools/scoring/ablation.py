"""Evaluations that differ in one step of the preprocessing or the numerics."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.config.schema import Config
from vit_jax.data.preprocessing import turns_upright
from vit_jax.families import ModelConfig
from vit_jax.weights.eval_preprocessing import PixelPath, as_stored, taken_apart

SHARES = (0.875, 0.9, 1.0, None)  # crop / shorter side; None: no crop
LN_EPS = (1e-6, 1e-5, 1e-12)  # Google's, PyTorch's default, Hugging Face's
# Epsilons of a ResNet: Google's, and timm's.
RESNET_EPS = {
  "Google's": {"gn_eps": None, "ws_eps": None, "ws_eps_on": None},
  "timm's": {"gn_eps": 1e-5, "ws_eps": 1e-8, "ws_eps_on": "var"},
}

# Steps that can be replaced, if the model has them.
STEPS = (
  *("dct", "upsampling", "resizer", "filter", "antialiasing", "crop"),
  *("gelu", "ln_eps", "resnet_eps", "products"),
)


class Swap(NamedTuple):
  """An evaluation that differs from a given one in one step.

  step: One of `STEPS`.
  was: Text of the original value.
  value: Text of the new value.
  config: Config with the new value.
  """

  step: str
  was: str
  value: str
  config: Config


def swaps(config: Config) -> list[Swap]:
  """Returns the evaluations that differ from a config in a single step.

  A preprocessing that `eval_preprocessing` cannot parse is not changed.
  """
  runs = []
  path = taken_apart(config.data.ops)
  for step, was, value, other in _path_swaps(path) if path else ():
    runs.append(Swap(step, was, value, _with_ops(config, other.ops)))
  for step, was, value, model in _model_swaps(config.model):
    changed = dataclasses.replace(config, model=model)
    runs.append(Swap(step, was, value, changed))
  return runs


def _path_swaps(
  path: PixelPath,
) -> Iterator[tuple[str, str, str, PixelPath]]:
  replace = dataclasses.replace
  other = {"fast": "accurate", "accurate": "fast"}[path.dct]
  yield "dct", path.dct, other, replace(path, dct=other)
  other = {"fancy": "plain", "plain": "fancy"}[path.upsampling]
  yield "upsampling", path.upsampling, other, replace(path, upsampling=other)
  is_smooth = path.filter in ("bilinear", "bicubic")
  # Pillow always antialiases, and has no other filters.
  if path.resizer == "pillow" or (is_smooth and path.antialias):
    other = {"pillow": "tensorflow", "tensorflow": "pillow"}[path.resizer]
    changed = replace(path, resizer=other, antialias=True)
    yield "resizer", path.resizer, other, changed
  filters = ("bilinear", "bicubic", "area")
  for name in filters[: 2 if path.resizer == "pillow" else 3]:
    if name != path.filter:
      yield "filter", path.filter, name, replace(path, filter=name)
  if is_smooth:
    was, value = ("on", "off") if path.antialias else ("off", "on")
    note = ", by tensorflow" if path.resizer == "pillow" else ""
    changed = replace(path, resizer="tensorflow", antialias=not path.antialias)
    yield "antialiasing", was, value + note, changed
  for share in SHARES:
    changed = path.cropped(share)
    if changed != path:
      yield "crop", _share(path.share), _share(share), changed


def _share(share: float | None) -> str:
  return "squashed" if share is None else f"{share:.3g}"


def _model_swaps(
  model: ModelConfig,
) -> Iterator[tuple[str, str, str, ModelConfig]]:
  replace = dataclasses.replace
  if hasattr(model, "gelu"):
    other = {"tanh": "erf", "erf": "tanh"}[model.gelu]
    yield "gelu", model.gelu, other, replace(model, gelu=other)
  if hasattr(model, "ln_eps"):
    for eps in LN_EPS:
      if eps != model.ln_eps:
        changed = replace(model, ln_eps=eps)
        yield "ln_eps", f"{model.ln_eps:g}", f"{eps:g}", changed
  if getattr(model, "stages", None):
    keys = RESNET_EPS["timm's"]
    own = {key: getattr(model, key) for key in keys}
    was = next((n for n, eps in RESNET_EPS.items() if eps == own), "its own")
    for name, eps in RESNET_EPS.items():
      if eps != own:
        yield "resnet_eps", was, name, replace(model, **eps)
  other = "bfloat16" if model.dtype == "float32" else "float32"
  yield "products", model.dtype, other, replace(model, dtype=other)


def _with_ops(config: Config, ops: str) -> Config:
  return dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, ops=ops),
    evals=tuple(
      dataclasses.replace(
        e, ops=ops if turns_upright(e.ops) else as_stored(ops)
      )
      for e in config.evals
    ),
  )

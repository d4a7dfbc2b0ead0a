"""What a score owes to each step of the pixels' path and of the numerics.

Each step is exchanged alone, the others staying as they are, and the answers
are compared image by image. So a change of the score that is no more than
chance shows as such: as many answers become right as wrong. Changes of single
steps need not add up to that of all of them together.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import evaluate
from vit_jax.config import Config
from vit_jax.config.pixel_path import DECODERS, PixelPath, taken_apart
from vit_jax.data.sources import Sources
from vit_jax.families import ModelConfig

SHARES = (0.875, 0.9, 1.0, None)  # of the shorter side; None: not cropped
LN_EPS = (1e-6, 1e-5, 1e-12)  # Google's, PyTorch's default, Hugging Face's
# Epsilons of a ResNet: Google's, and timm's.
RESNET_EPS = {
  "Google's": {"gn_eps": None, "ws_eps": None, "ws_eps_on": None},
  "timm's": {"gn_eps": 1e-5, "ws_eps": 1e-8, "ws_eps_on": "var"},
}


class Swap(NamedTuple):
  """A run of evaluation that differs in one step.

  factor: The step.
  was: What it is, in words.
  value: What it becomes.
  config: The run with it.
  """

  factor: str
  was: str
  value: str
  config: Config


def swaps(config: Config) -> list[Swap]:
  """Returns the runs that differ from one in a single step.

  The path of the pixels is left alone where it is none that `pixel_path` knows.
  """
  found = []
  path = taken_apart(config.data.ops)
  for factor, was, value, other in _of_path(path) if path else ():
    found.append(Swap(factor, was, value, _with_ops(config, other.ops)))
  for factor, was, value, model in _of_model(config.model):
    changed = dataclasses.replace(config, model=model)
    found.append(Swap(factor, was, value, changed))
  return found


def _of_path(path: PixelPath):
  replace = dataclasses.replace
  for decoder in DECODERS:
    if decoder != path.decoder:
      changed = replace(path, decoder=decoder)
      yield "decoder", path.decoder, decoder, changed
  is_smooth = path.filter in ("bilinear", "bicubic")
  # Pillow has no other filters, and always antialiases.
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


def _of_model(model: ModelConfig):
  replace = dataclasses.replace
  if hasattr(model, "gelu"):
    other = {"tanh": "erf", "erf": "tanh"}[model.gelu]
    yield "GELU", model.gelu, other, replace(model, gelu=other)
  if hasattr(model, "ln_eps"):
    for eps in LN_EPS:
      if eps != model.ln_eps:
        changed = replace(model, ln_eps=eps)
        yield "LayerNorm eps", f"{model.ln_eps:g}", f"{eps:g}", changed
  if getattr(model, "stages", None):
    keys = RESNET_EPS["timm's"]
    own = {key: getattr(model, key) for key in keys}
    was = next((n for n, eps in RESNET_EPS.items() if eps == own), "its own")
    for name, eps in RESNET_EPS.items():
      if eps != own:
        yield "ResNet's eps", was, name, replace(model, **eps)
  other = "bfloat16" if model.dtype == "float32" else "float32"
  yield "products", model.dtype, other, replace(model, dtype=other)


def _with_ops(config: Config, ops: str) -> Config:
  return dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, ops=ops),
    evals=tuple(dataclasses.replace(e, ops=ops) for e in config.evals),
  )


def explain(
  config: Config, path: str, opened: Sources | None = None
) -> list[dict[str, Any]]:
  """Scores a file once for each swap, and compares the answers.

  Args:
    config: Its model and evaluators, which are of kind "classification" or
      "subset".
    path: The file, as for `evaluate.record`.
    opened: Splits that are open already; None: none.

  Returns:
    A row for each evaluator and swap: on (its name), factor, was, value, images
    (their number), top1 (percent) and change (percentage points), error (the
    change's standard error, from the number of answers that differ), gained and
    lost (images answered right only with, or without, the swap) and other
    (images with another answer).

  Raises:
    ConfigError: As `evaluate.evaluate`.
  """
  base = _hits(config, path, opened)
  rows = []
  for swap in swaps(config):
    if jax.process_index() == 0:
      print(f"swap        {swap.factor}: {swap.value}", flush=True)
    for name, hits in _hits(swap.config, path, opened).items():
      facts = {"on": name, **swap._asdict(), **compared(base[name], hits)}
      del facts["config"]
      rows.append(facts)
  return sorted(rows, key=lambda row: list(base).index(row["on"]))


def _hits(config, path, opened) -> dict[str, dict[str, np.ndarray]]:
  ready = evaluate.open_checkpoint(config, path, opened=opened)
  return {e.config.name: e.hits(ready.params) for e in ready.evaluators}


def compared(
  one: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> dict[str, Any]:
  """Compares two sets of answers to the same images; see `explain`.

  With a images gained and b lost of n, the difference of the two scores is
  (a - b) / n, and its standard error sqrt(a + b - (a - b)^2 / n) / n: images
  answered alike do not enter it (McNemar's test).

  Args:
    one: Of the base, as `Classification.hits` returns it.
    other: With the swap.

  Raises:
    ValueError: They are of different images.
  """
  if not np.array_equal(one["index"], other["index"]):
    raise ValueError(
      f"got answers to {len(one['index'])} and {len(other['index'])} images,"
      " expected the same images."
    )
  was, now, num = one["is_right"], other["is_right"], len(one["index"])
  gained, lost = int((now & ~was).sum()), int((was & ~now).sum())
  change = (gained - lost) / num
  return {
    "images": num,
    "top1": 100 * float(now.mean()),
    "change": 100 * change,
    "error": 100 * float(np.sqrt(gained + lost - num * change**2)) / num,
    "gained": gained,
    "lost": lost,
    "other": int((one["prediction"] != other["prediction"]).sum()),
  }


def table(rows: list[dict[str, Any]]) -> str:
  """Returns the rows of one file as text."""
  lines = [
    (
      *("on", "step", "is", "instead", "top-1", "change", "error"),
      *("gained", "lost", "other answers"),
    )
  ]
  for row in rows:
    lines.append(
      (
        *(row[key] for key in ("on", "factor", "was", "value")),
        f"{row['top1']:.2f}",
        f"{row['change']:+.2f}",
        f"{row['error']:.2f}",
        f"+{row['gained']:,}",
        f"-{row['lost']:,}",
        f"{row['other']:,} of {row['images']:,}",
      )
    )
  return aligned(lines, left=(0, 1, 2, 3))


def aligned(lines: list[tuple[str, ...]], left: tuple[int, ...]) -> str:
  """Returns cells in columns; those in `left` begin where the column does."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      f"{cell:<{w}}" if i in left else f"{cell:>{w}}"
      for i, (cell, w) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )

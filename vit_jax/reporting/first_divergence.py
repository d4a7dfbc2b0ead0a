"""Where two runs part: their steps by fingerprints, checkpoints by digests."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.callbacks import fingerprints
from vit_jax.checkpointing import checkpointer
from vit_jax.config import flat, json_file, options_of

NAMES = ("A", "B")
# What metadata have of where a run took place, and of its data.
FACTS = (
  "devices",
  "processes",
  "mesh",
  "versions",
  "commit",
  "num_examples",
  "num_classes",
  "total_steps",
  "image_size",
  "preprocessing",
)
OLD = "an older version wrote them"


class Side(NamedTuple):
  """What is read of a run.

  name: As it was given.
  options: config.json, flat; {}: there is none that can be read.
  steps: Its fingerprints, of `fingerprints.RECORD`.
  checkpoints: Step -> folder.
  folder: Of the run.
  """

  name: str
  options: dict[str, Any]
  steps: np.ndarray
  checkpoints: dict[int, epath.Path]
  folder: epath.Path

  def facts(self, step: int | None) -> dict[str, Any]:
    """Returns `FACTS`, flat, of the process that came to a step.

    They are those of the first checkpoint from that step on; where there is
    none, or for None, of the newest process of the run.
    """
    later = [s for s in sorted(self.checkpoints) if step and s >= step]
    found = _json(self.folder / "metadata.json")
    if later:
      try:
        found = checkpointer.load_metadata(str(self.checkpoints[later[0]]))
      except (OSError, ValueError):
        pass  # told where the checkpoints are compared
    return flat({k: found[k] for k in FACTS if k in found})


class Parting(NamedTuple):
  """What a comparison found.

  lines: In words.
  is_compared: Whether both have any step, or any checkpoint, that is known.
  is_equal: Whether all that could be compared is.
  """

  lines: list[str]
  is_compared: bool
  is_equal: bool


def compare(a: str, b: str) -> Parting:
  """Compares two runs, as far as both go.

  Raises:
    FileNotFoundError: One of them is no run.
  """
  sides = (read(a), read(b))
  lines = [_side(*pair) for pair in zip(NAMES, sides, strict=True)]
  first, told_steps, common = _steps(*sides)
  parted, told_checkpoints, known = _checkpoints(*sides)
  at = min((s for s in (first, parted) if s is not None), default=None)
  lines += ["", "steps", *_indented(told_steps)]
  lines += ["checkpoints", *_indented(told_checkpoints)]
  lines += ["differs between them", *_indented(_facts(*sides, at))]
  if at is None:
    end = (
      "equal in all that both have"
      if common or known
      else ("nothing to compare: no step and no checkpoint is known of both")
    )
  else:
    end = f"the runs part at step {at}" + (
      "" if first is not None else " or before it, as their checkpoints show"
    )
  return Parting([*lines, "", end], bool(common or known), at is None)


def read(run: str) -> Side:
  """Reads what is compared of a run; no arrays.

  Raises:
    FileNotFoundError: There is no such run.
  """
  folder = epath.Path(run)
  there = folder / checkpointer.FOLDER
  steps = {
    int(p.name): p
    for p in (there.iterdir() if there.is_dir() else ())
    if p.name.isdigit() and p.is_dir()
  }
  files = ("config.json", fingerprints.FILE)
  if not steps and not any((folder / name).exists() for name in files):
    raise FileNotFoundError(
      f"got {run!r}, expected the folder of a run: it has no"
      f" {checkpointer.FOLDER}/, {' or '.join(files)}."
    )
  config = _json(folder / "config.json")
  try:
    options = flat(options_of(config)) if config else {}
  except (AttributeError, KeyError, TypeError, ValueError):
    options = {}
  found = fingerprints.read(run)
  return Side(run, options, found, dict(sorted(steps.items())), folder)


def _json(path: epath.Path) -> dict[str, Any]:
  try:
    return json_file.read(path)
  except (OSError, ValueError):
    return {}


def _side(name: str, side: Side) -> str:
  if len(side.steps):
    first, last = side.steps["step"][[0, -1]]
    known = f"fingerprints of steps {first} to {last}"
    if missing := int(last) - int(first) + 1 - len(side.steps):
      known += f", without {missing} between"
  else:
    known = f"no fingerprints ({OLD}, or the run has no step yet)"
  steps = ", ".join(map(str, side.checkpoints)) or "none"
  return f"{name}  {side.name}: {known}; checkpoints: {steps}"


def _steps(a: Side, b: Side) -> tuple[int | None, list[str], int]:
  """Returns the first step that differs, words, and how many both have."""
  steps, of_a, of_b = np.intersect1d(
    a.steps["step"], b.steps["step"], return_indices=True
  )
  if not len(steps):
    return None, ["none that both have a fingerprint of"], 0
  x, y = a.steps[of_a], b.steps[of_b]
  words = [v.view("<u4").reshape(len(v), -1) for v in (x, y)]
  differs = (words[0] != words[1]).any(1)
  span = f"steps {steps[0]} to {steps[-1]}"
  if not differs.any():
    return None, [f"{span}: equal, {len(steps)} that both have"], len(steps)
  (where,) = np.nonzero(differs)
  i = int(where[0])
  told = [f"steps {steps[0]} to {steps[i - 1]}: equal"] if i else []
  told += [f"step {steps[i]}: {text}" for text in _how(x[i], y[i])]
  told += _shifted(a, b, x[i], y[i])
  with np.errstate(all="ignore"):
    apart = np.abs(x["loss"] - y["loss"]) / np.abs(x["loss"])
  apart = apart[np.isfinite(apart)]
  told.append(
    f"{len(where)} of {len(steps)} steps differ; the loss by at most"
    f" {apart.max(initial=0):.2g} of its value"
  )
  return int(steps[i]), told, len(steps)


def _how(x: np.void, y: np.void) -> Iterator[str]:
  """Yields in what a step differs, and what it does not explain."""
  if x["records"] != y["records"]:
    yield "other records (or other labels of the same)"
  elif x["order"] != y["order"]:
    yield "the same records in another order"
  elif x["pixels"] != y["pixels"]:
    yield "the same records with other pixels: decoded or augmented otherwise"
  elif x["loss"].tobytes() != y["loss"].tobytes():
    yield (
      "the same images, another loss: other parameters before the step, or"
      " other arithmetic in it"
    )
  elif x["grad_norm"].tobytes() != y["grad_norm"].tobytes():
    yield "the same images and loss, another gradient"
  else:
    yield "the same images, loss and gradient, another update"
  for name in ("loss", "grad_norm", "param_norm"):
    if x[name].tobytes() != y[name].tobytes():
      yield f"{name} {x[name]:.9g} and {y[name]:.9g}{_units(x[name], y[name])}"
  for name in ("undecodable", "is_applied"):
    if x[name] != y[name]:
      yield f"{name} {x[name]} and {y[name]}"


def _units(x: np.float32, y: np.float32) -> str:
  """Returns how many float32 are between two, if they are close."""
  if not (np.isfinite(x) and np.isfinite(y)) or np.sign(x) != np.sign(y):
    return ""
  units = abs(int(x.view("<i4")) - int(y.view("<i4")))
  if not 0 < units <= 1000:
    return ""
  return f" ({units} unit{'s' * (units > 1)} in the last place)"


def _shifted(a: Side, b: Side, x: np.void, y: np.void) -> list[str]:
  """Returns whether one run has the other's records at another step."""
  if x["records"] == y["records"]:
    return []
  for name, side, other, mine in (("B", b, "A", x), ("A", a, "B", y)):
    found = side.steps["step"][side.steps["records"] == mine["records"]]
    if len(found):
      return [
        f"step {mine['step']}: the records that {other} has there, {name} has"
        f" at step {found[0]}"
      ]
  return []


def _checkpoints(a: Side, b: Side) -> tuple[int | None, list[str], int]:
  """Returns the first step whose checkpoints differ, words, and how many of
  them could be compared."""
  steps = [s for s in a.checkpoints if s in b.checkpoints]
  if not steps:
    return None, ["none of a step that both have"], 0
  parted, told, known = None, [], 0
  for step in steps:
    found = []
    for side, name in ((a, "A"), (b, "B")):
      try:
        found.append(checkpointer.digests(str(side.checkpoints[step])))
        if not found[-1]:
          told.append(f"step {step}: no digests in {name} ({OLD})")
      except (OSError, ValueError) as e:
        told.append(f"step {step} of {name}: {e}")
    if not all(found) or len(found) < len(NAMES):
      continue
    known += 1
    x, y = ({f"{i}/{p}": d for i in f for p, d in f[i].items()} for f in found)
    different = [p for p in dict.fromkeys([*x, *y]) if x.get(p) != y.get(p)]
    if not different:
      told.append(f"step {step}: equal, {len(x)} arrays")
      continue
    parted = step if parted is None else parted
    path = different[0]
    told.append(
      f"step {step}: {len(different)} of {len(x.keys() | y.keys())} arrays"
      f" differ, the first is {path}: {_digest(x.get(path))} and"
      f" {_digest(y.get(path))}"
    )
  return parted, told, known


def _digest(found: Any) -> str:
  if found is None:
    return "not there"
  dtype, shape, sums = found
  return f"{dtype}[{','.join(map(str, shape))}] {sums}"


def _facts(a: Side, b: Side, step: int | None) -> list[str]:
  """Returns what is not the same in configs and metadata, a line each."""
  pairs = [
    ({f"config.{k}": v for k, v in a.options.items()},
     {f"config.{k}": v for k, v in b.options.items()}),
    (a.facts(step), b.facts(step)),
  ]  # fmt: skip
  told = [
    f"{key}: {x.get(key, 'not known')!s} and {y.get(key, 'not known')!s}"
    for x, y in pairs
    for key in dict.fromkeys([*x, *y])
    if x.get(key) != y.get(key)
  ]
  for name, side in zip(NAMES, (a, b), strict=True):
    if not side.options:
      told.append(f"{name} has no config.json that can be read")
  return told or ["nothing that is known: config, devices, mesh, versions"]


def _indented(lines: list[str]) -> list[str]:
  return [f"  {line}" for line in lines]

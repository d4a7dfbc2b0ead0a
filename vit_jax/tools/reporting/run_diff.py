"""Compares two runs: options, rows of metrics, digests of checkpoints."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.checkpointing import checkpointer
from vit_jax.config import flat, json_file, options_of
from vit_jax.digests import Digest
from vit_jax.paths import with_absolute_folder
from vit_jax.writers import metric_writer

NAMES = ("A", "B")
# Compared keys of metadata.json: machine, versions, data.
METADATA = (
  "devices",
  "processes",
  "mesh",
  "versions",
  "commit",
  "num_examples",
  "num_classes",
  "data_identity",
  "total_steps",
  "image_size",
  "preprocessing",
)
MOST_SHOWN = 3  # metrics that are shown of the first different row


class Run(NamedTuple):
  """The parts of a run that are compared.

  settings: Path -> value of options (`config.` and the path) and `METADATA`.
  rows: Step -> metric -> value, without metrics that measure the machine.
  checkpoints: Step -> folder.
  """

  settings: dict[str, Any]
  rows: dict[int, dict[str, float]]
  checkpoints: dict[int, epath.Path]


class Comparison(NamedTuple):
  """The result of a comparison.

  lines: The text that the command prints.
  is_compared: Whether both runs have a metric or a checkpoint in common.
  is_equal: Whether all common metrics and checkpoints are equal.
  """

  lines: list[str]
  is_compared: bool
  is_equal: bool


def compare(a: str, b: str) -> Comparison:
  """Compares two runs, up to the last step of the shorter one.

  Raises:
    FileNotFoundError: One of the folders has no run.
    ValueError: A file of a run is damaged.
  """
  runs = (read(a), read(b))
  lines = [
    f"{name}  {path}: {_extent(run)}"
    for name, path, run in zip(NAMES, (a, b), runs, strict=True)
  ]
  row_step, row_lines, num_rows = _compare_rows(*(r.rows for r in runs))
  step, checkpoint_lines, num_checkpoints = _compare_checkpoints(
    *(r.checkpoints for r in runs)
  )
  lines += ["", "options, versions and data"]
  lines += [
    f"  {line}" for line in _compare_settings(*(r.settings for r in runs))
  ]
  lines += ["metrics", *(f"  {line}" for line in row_lines)]
  lines += ["checkpoints", *(f"  {line}" for line in checkpoint_lines), ""]
  is_compared = bool(num_rows or num_checkpoints)
  differing = [s for s in (row_step, step) if s is not None]
  if differing:
    lines.append(f"the runs differ at step {min(differing)}, or before it")
  elif is_compared:
    lines.append("equal in all that both have")
  else:
    lines.append("nothing to compare: no metric and no checkpoint is in both")
  return Comparison(lines, is_compared, not differing)


def read(run: str) -> Run:
  """Reads the compared parts of a run, without arrays.

  Raises:
    FileNotFoundError: The folder has no run.
    ValueError: A file of the run is damaged.
  """
  folder = epath.Path(run)
  there = folder / checkpointer.FOLDER
  checkpoints = {
    int(p.name): p
    for p in (there.iterdir() if there.is_dir() else ())
    if p.name.isdigit() and p.is_dir()
  }
  files = ("config.json", metric_writer.METRICS)
  if not checkpoints and not any((folder / name).exists() for name in files):
    raise FileNotFoundError(f"got {run!r}, expected the folder of a run.")
  metadata = json_file.read(folder / "metadata.json")
  config = json_file.read(folder / "config.json")
  settings = flat({"config": options_of(config)}) if config else {}
  settings |= flat({k: metadata[k] for k in METADATA if k in metadata})
  rows: dict[int, dict[str, float]] = {}
  for row in metric_writer.read_metrics(run):
    values = {k: v for k, v in row.items() if not metric_writer.is_measured(k)}
    del values["step"]
    rows.setdefault(row["step"], {}).update(values)
  return Run(settings, rows, dict(sorted(checkpoints.items())))


def _extent(run: Run) -> str:
  checkpoints = ", ".join(map(str, run.checkpoints)) or "none"
  rows = f"steps {min(run.rows)} to {max(run.rows)}" if run.rows else "none"
  return f"metrics: {rows}; checkpoints: {checkpoints}"


def _compare_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
  """Returns a line for each setting that differs."""
  lines = [
    f"{key}: {a.get(key, 'not known')!s} and {b.get(key, 'not known')!s}"
    for key in dict.fromkeys([*a, *b])
    if with_absolute_folder(a.get(key)) != with_absolute_folder(b.get(key))
  ]
  return lines or ["equal"]


def _compare_rows(
  a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> tuple[int | None, list[str], int]:
  """Compares the metrics that both runs have, step by step.

  Returns:
    The first step that differs, or None; lines of text; the number of steps for
    which both runs have a metric.
  """
  differing, common = {}, []
  for step in sorted(a.keys() & b.keys()):
    keys = [key for key in a[step] if key in b[step]]
    pairs = {key: (a[step][key], b[step][key]) for key in keys}
    # By repr, NaN is equal to NaN.
    names = {k: (x, y) for k, (x, y) in pairs.items() if repr(x) != repr(y)}
    if names:
      differing[step] = names
    if keys:
      common.append(step)
  if not common:
    return None, ["none in both runs"], 0
  span = f"steps {common[0]} to {common[-1]}"
  if not differing:
    return None, [f"{span}: equal, {len(common)} rows"], len(common)
  first = min(differing)
  lines = [
    f"step {first}: {name} {x!r} and {y!r}"
    for name, (x, y) in list(differing[first].items())[:MOST_SHOWN]
  ]
  if (more := len(differing[first]) - MOST_SHOWN) > 0:
    lines.append(f"step {first}: {more} more metrics differ")
  lines.append(f"{span}: {len(differing)} of {len(common)} rows differ")
  return first, lines, len(common)


def _compare_checkpoints(
  a: Mapping[int, epath.Path], b: Mapping[int, epath.Path]
) -> tuple[int | None, list[str], int]:
  """Compares the digests of the checkpoints that both runs have.

  Returns:
    The first step that differs, or None; lines of text; the number of compared
    steps.
  """
  steps = [step for step in a if step in b]
  if not steps:
    return None, ["none of a step that both have"], 0
  first, lines, compared = None, [], 0
  for step in steps:
    arrays: list[dict[str, Digest]] = []
    for name, folder in zip(NAMES, (a[step], b[step]), strict=True):
      try:
        arrays.append(_digests(folder))
      except (OSError, ValueError) as e:
        lines.append(f"step {step} of {name}: {e}")
    if len(arrays) < len(NAMES):
      continue
    compared += 1
    x, y = arrays
    paths = [p for p in dict.fromkeys([*x, *y]) if x.get(p) != y.get(p)]
    if not paths:
      lines.append(f"step {step}: equal, {len(x)} arrays")
      continue
    first = step if first is None else first
    lines.append(
      f"step {step}: {len(paths)} of {len(x.keys() | y.keys())} arrays differ,"
      f" the first is {paths[0]}: {_shown(x.get(paths[0]))} and"
      f" {_shown(y.get(paths[0]))}"
    )
  return first, lines, compared


def _digests(folder: epath.Path) -> dict[str, Digest]:
  """Returns item and path -> digest of the arrays of a checkpoint."""
  items = checkpointer.digests(str(folder))
  return {f"{i}/{path}": d for i in items for path, d in items[i].items()}


def _shown(digest: Digest | None) -> str:
  if digest is None:
    return "not there"
  return f"{digest.dtype}[{','.join(map(str, digest.shape))}] {digest.sums}"

"""The files of finished or stopped runs, read without jax."""

import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

from vit_jax.config import Config, EvaluatorConfig, build, upgraded
from vit_jax.runtime import accounting
from vit_jax.runtime.averages import groups
from vit_jax.runtime.progress import format_seconds

METRICS = "metrics.jsonl"
# Metrics that tell evaluators apart, whatever their kind.
TOP1 = re.compile(r"(?P<name>.+)/top1")
SHOT = re.compile(r"(?P<name>[^/]+)/(?P<shots>\d+)shot")
# Order and names of the runs that `make demo` makes.
DEMO = {
  "pretrain": "pre-trained",
  "finetune": "fine-tuned",
  "scratch": "from scratch",
}


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of one workdir; missing ones are empty.

  name: Name of the folder.
  config: Contents of config.json.
  metadata: Contents of metadata.json.
  rows: The lines of metrics.jsonl, in the order written.
  """

  name: str
  path: pathlib.Path
  config: dict[str, Any]
  metadata: dict[str, Any]
  rows: list[dict[str, Any]]

  @property
  def label(self) -> str:
    return DEMO.get(self.name, self.name)

  @property
  def dataset(self) -> str:
    """The name without options: "glyphs" for "glyphs/size=32"."""
    full = self.config.get("data", {}).get("dataset") or "unknown data"
    return full if full.startswith("folder:") else full.split("/")[0]

  @functools.cached_property
  def evals(self) -> dict[str, EvaluatorConfig]:
    """Options of the evaluators, by name; those of `faults` at defaults."""
    data = self.config.get("data", {})
    return {
      e.name: e.resolved(data.get("dataset"), data.get("batch_size"))
      for e in self._built[0].evals
    }

  @property
  def faults(self) -> list[str]:
    """Options of the evaluators that this version cannot read."""
    return [fault.rstrip(".") for fault in self._built[1]]

  @functools.cached_property
  def _built(self) -> tuple[Config, list[str]]:
    return build({"evals": self.config.get("evals")})

  @property
  def steps(self) -> int:
    """Updates applied, as far as the metrics show."""
    return max((r["step"] for r in self.rows), default=0)

  @functools.cached_property
  def names(self) -> list[str]:
    """All metrics, in the order of their first line."""
    return list(dict.fromkeys(k for r in self.rows for k in r))

  def series(self, name: str | None) -> tuple[list[int], list[float]]:
    """Returns steps and finite values of a metric."""
    points = [(r["step"], r[name]) for r in self.rows if is_number(r.get(name))]
    return [s for s, _ in points], [v for _, v in points]

  def last(self, name: str | None) -> float | None:
    """Returns the value in the last line that has the metric."""
    for row in reversed(self.rows):
      if name in row:
        return row[name] if is_number(row[name]) else None
    return None

  def evaluators(self, metric: re.Pattern) -> list[str]:
    """Returns names of evaluators, in the order of the config.

    Args:
      metric: What they wrote, `TOP1` or `SHOT`.
    """
    matches = [metric.fullmatch(n) for n in self.names]
    written = dict.fromkeys(m["name"] for m in matches if m)
    return [n for n in self.evals if n in written] + [
      n for n in written if n not in self.evals
    ]

  @functools.cached_property
  def groups(self) -> dict[str, list[str]]:
    """Names of the evaluators over which a mean was written, by its name."""
    written = {n.split("/")[0] for n in self.names}
    return {
      group: [e.name for e in members if e.name in written]
      for group, members in groups(self.evals.values()).items()
      if group in written
    }

  def fewshot_names(self) -> list[str]:
    """Returns the few-shot evaluators, a mean in place of a group."""
    members = {n for names in self.groups.values() for n in names}
    return [n for n in self.evaluators(SHOT) if n not in members]

  def scored(self, name: str) -> str:
    """Returns data set and split of an evaluator, its name if unknown."""
    if name in self.groups:
      return f"mean of {len(self.groups[name])} data sets"
    texts = {
      n: f"{short(e.dataset or n)} {e.split}" for n, e in self.evals.items()
    }
    text = texts.get(name, name)
    same = [n for n, t in texts.items() if t == text]
    return text if len(same) < 2 else f"{text} ({name})"

  def is_held_out(self, name: str) -> bool:
    """Whether an evaluator scores a part of the split that was trained on."""
    data, options = self.config.get("data", {}), self.evals.get(name)
    if options is None or options.dataset != data.get("dataset"):
      return False
    base = options.split.partition("[")[0]
    return base == str(data.get("split")).partition("[")[0]

  def top1(self) -> str | None:
    """Returns the name of the metric that represents the run."""
    names = self.evaluators(TOP1)
    return f"{names[0]}/top1" if names else None

  def curve(self) -> str | None:
    """Returns the top-1 that was scored most often: a test is scored once."""
    names = [f"{n}/top1" for n in self.evaluators(TOP1)]
    return max(names, key=lambda n: len(self.series(n)[0]), default=None)

  def fewshot(self, name: str, of: str = "") -> dict[str, dict[str, float]]:
    """Returns the last accuracies by L2 weight, then by shots.

    Args:
      name: Name of the evaluator.
      of: "" for the run's features, or a baseline, "raw_pixels".

    Returns:
      {"16": {"1": 0.5, "5": 0.7}, "1024": ...}, with the weight that the config
      names first before the others, "?" if it is unknown; {} if there are none.
    """
    options = self.evals.get(self.groups.get(name, [name])[0])
    first = f"{options.l2[0]:g}" if options and options.l2 else "?"
    prefix = re.escape(f"{name}/{of}/" if of else f"{name}/")
    pattern = re.compile(prefix + r"(?:l2=(?P<l2>[^/]+)/)?(?P<shots>\d+)shot")
    matches = [m for m in map(pattern.fullmatch, self.names) if m]
    matches.sort(key=lambda m: (m["l2"] is not None, int(m["shots"])))
    found: dict[str, dict[str, float]] = {}
    for match in matches:
      value = self.last(match[0])
      if value is not None:
        found.setdefault(match["l2"] or first, {})[match["shots"]] = value
    return found

  def wall_seconds(self) -> float | None:
    """Returns the time from the first line to the last, pauses included."""
    times = [r["time"] for r in self.rows if is_number(r.get("time"))]
    return times[-1] - times[0] if len(times) > 1 else None


def find_runs(directory: str | pathlib.Path) -> list[Run]:
  """Reads a run, or all runs directly below a directory.

  Returns:
    The runs; those of the demo in their order, the others by name.

  Raises:
    ValueError: There is no run.
  """
  base = pathlib.Path(directory)
  if not base.is_dir():
    raise ValueError(
      f"{str(directory)!r}: got no such directory, expected the workdir of a"
      f" run, or a directory of such. Is the path right?"
    )
  if _is_run(base):
    return [_read(base)]
  order = list(DEMO)
  rank = lambda p: (order.index(p.name) if p.name in order else 99, p.name)
  runs = [_read(p) for p in sorted(base.iterdir(), key=rank) if _is_run(p)]
  if not runs:
    raise ValueError(
      f"{str(directory)!r}: got a directory without a run, expected"
      f" {METRICS} or config.json in it or one level below. Train first:"
      f" vit-jax train --config=... --workdir={directory}."
    )
  return runs


def is_demo(runs: list[Run], directory: str | pathlib.Path) -> bool:
  """Whether these are runs of the demo, complete or not."""
  made = {"pretrain", "finetune"} <= {r.name for r in runs}
  return made or (pathlib.Path(directory) / "demo.json").exists()


def summarise(runs: list[Run], directory: str | pathlib.Path) -> dict[str, Any]:
  """Returns the contents of summary.json; null where nothing was measured.

  Shares are from 0 to 1, each from the last line that has it. Runs other than
  the demo's have all their last values instead, by run.
  """
  facts = _json(pathlib.Path(directory) / "demo.json")
  versions = facts.get("versions") or next(
    (r.metadata["versions"] for r in runs if r.metadata.get("versions")), None
  )
  end = {
    "wall_seconds": facts.get("wall_seconds") or _wall_seconds(runs, directory),
    "versions": versions,
  }
  if not is_demo(runs, directory):
    values = {
      r.name: {n: r.last(n) for n in r.names if n not in ("step", "time")}
      for r in runs
    }
    return {"runs": values, **end}
  by_name = {r.name: r for r in runs}
  top1 = {n: r.last(r.top1()) for n, r in by_name.items()}
  shots = {of: {} for of in ("features", "random_init", "raw_pixels")}
  if run := by_name.get("pretrain"):
    for name in run.evaluators(SHOT)[:1]:
      shots = {
        of: run.fewshot(name, of.replace("features", "")) for of in shots
      }
  first = {of: next(iter(by_l2.values()), None) for of, by_l2 in shots.items()}
  return {
    "glyphs_val_accuracy": top1.get("pretrain"),
    "fewshot": first["features"],
    "fewshot_random_init": first["random_init"],
    "fewshot_raw_pixels": first["raw_pixels"],
    "fewshot_by_l2": shots,
    "digits_test_accuracy": top1.get("finetune"),
    "digits_test_accuracy_from_scratch": top1.get("scratch"),
    **end,
  }


def short(dataset: str) -> str:
  """Returns a data set's name without its options, or path.

  Example:
    >>> short("glyphs/size=32"), short("folder:/data/flowers/")
    ('glyphs', 'flowers')
  """
  if dataset.startswith("folder:"):
    return pathlib.PurePath(dataset.removeprefix("folder:")).name or dataset
  return dataset.split("/")[0]


def is_number(value) -> bool:
  """Whether a number is finite: JSON Lines written by Python may have NaN."""
  return isinstance(value, int | float) and math.isfinite(value)


def facts(run: Run) -> dict[str, str]:
  """Returns the facts of a run, by the names that the table shows."""
  config, metadata = run.config, run.metadata
  found = {}
  if model := config.get("model"):
    more = [
      f"{key.replace('_dim', ' width').replace('num_', '')} {model[key]}"
      for key in ("width", "depth", "mlp_dim", "num_heads")
      if model.get(key) is not None
    ]
    found["model"] = ", ".join([model.get("variant", ""), *more])
  if metadata.get("num_params"):
    found["parameters"] = f"{metadata['num_params']:,}"
  if objective := upgraded(config).get("objective"):
    words = [objective.get("kind"), *objective.values()]
    words = dict.fromkeys(w for w in words if isinstance(w, str))
    found["objective"] = ", ".join(words).replace("_", " ")
  if config:
    found["starts from"] = str(config.get("init") or "random weights")
  if data := config.get("data"):
    found["data"] = f"{data.get('dataset')} [{data.get('split')}]"
    if metadata.get("num_examples"):
      found["images"] = f"{metadata['num_examples']:,}"
  if size := metadata.get("image_size"):
    found["image size"] = " × ".join(map(str, size)) + " px"
  if grid := metadata.get("grid"):
    found["patches"] = " × ".join(map(str, grid))
  if run.rows:
    total = config.get("total_steps")
    of = f" of {total:,}" if total and total != run.steps else ""
    found["steps"] = f"{run.steps:,}{of}"
  if (data := config.get("data")) and data.get("batch_size"):
    found["batch"] = f"{data['batch_size']:,}"
  if optim := config.get("optim"):
    found["optimizer"] = f"{optim.get('name')}, peak lr {optim.get('lr'):g}"
  if metadata.get("devices"):
    found["devices"] = str(metadata["devices"])
  for metric, what in (
    ("images_seen", "images seen"),
    ("exaflops", "exaFLOPs"),
    ("device_hours", "device-hours"),
  ):
    if (value := run.last(f"train/{metric}")) is not None:
      found[what] = accounting.number(value)
  if before := metadata.get(accounting.KEY, {}).get("init"):
    found["the run before"] = accounting.text(before)
  if run.wall_seconds() is not None:
    found["time"] = format_seconds(run.wall_seconds())
  return found


def _is_run(path: pathlib.Path) -> bool:
  return (path / METRICS).exists() or (path / "config.json").exists()


def _read(path: pathlib.Path) -> Run:
  metadata = _json(path / "metadata.json")
  config = _json(path / "config.json") or metadata.get("config") or {}
  rows, file = [], path / METRICS
  for line in (
    file.read_text(encoding="utf-8").splitlines() if file.exists() else []
  ):
    try:
      row = json.loads(line)
    except json.JSONDecodeError:
      continue  # The process died while writing this line.
    if isinstance(row, dict) and isinstance(row.get("step"), int):
      rows.append(row)
  return Run(path.resolve().name, path, config, metadata, rows)


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the contents; {} if the file is missing.

  Raises:
    ValueError: It exists, but is no JSON object.
  """
  if not path.exists():
    return {}
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as e:
    raise ValueError(
      f"{path}: expected JSON, got {e}. Delete it to report without it."
    ) from None
  return values if isinstance(values, dict) else {}


def _wall_seconds(
  runs: list[Run], directory: str | pathlib.Path
) -> float | None:
  """Returns seconds to the last line written, since the time in `started`.

  `make demo` leaves that file (seconds of the epoch), so that installing
  packages does not count, but starting the programs and making the data does.
  Without it: the sum over the runs of the time from the first line to the last.
  """
  started = pathlib.Path(directory) / "started"
  times = [r["time"] for run in runs for r in run.rows if "time" in r]
  if started.exists() and times:
    return round(max(times) - float(started.read_text()), 3)
  spans = [s for s in (r.wall_seconds() for r in runs) if s is not None]
  return round(sum(spans), 3) if spans else None

"""Reads the files of runs, finished or not."""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from vit_jax.callbacks import accounting, run_record
from vit_jax.config import Config, EvaluatorConfig, build, json_file
from vit_jax.data import splits
from vit_jax.evaluators import groups
from vit_jax.finetune import results
from vit_jax.paths import (
  FOLDERS,
  is_remote,
  with_absolute_folder,
  with_options,
)
from vit_jax.writers import atomic_files
from vit_jax.writers.metric_writer import METRICS

LOSS = "train/loss"
PROBES = "probes"  # folder that vit_jax.finetune.probes writes
# Names of metrics, which tell the kinds of evaluators.
MAE = re.compile(r".+/mae")
R2 = re.compile(r"(?P<name>[^/]+)/r2")
TOP1 = re.compile(r"(?P<name>.+)/top1")
SHOT = re.compile(r"(?P<name>[^/]+)/(?P<shots>[0-9]{1,6})shot")
# Splits on which the options of a VTAB task are chosen.
VTAB = ("train800", "val200")


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of one workdir; a missing file is empty.

  name: Name of the folder; if it is not unique, with folders above it.
  config: Contents of config.json.
  metadata: Contents of metadata.json.
  rows: The lines of metrics.jsonl, in their order.
  process: Contents of process.json.
  last_sign: Time of the last sign of life of the process, seconds since the
    epoch; None: unknown.
  unread: Numbers of damaged lines in metrics.jsonl.
  """

  name: str
  path: pathlib.Path
  config: dict[str, Any]
  metadata: dict[str, Any]
  rows: list[atomic_files.Row]
  process: dict[str, Any] = dataclasses.field(default_factory=dict)
  last_sign: float | None = None
  unread: Sequence[int] = ()

  @property
  def is_trained(self) -> bool:
    """Whether the folder has a run, not only probes of published weights."""
    known = self.config or self.rows or self.unread
    return bool(known) or (self.path / "config.json").exists()

  @property
  def dataset(self) -> str:
    """Name of the data set without options: "glyphs" for "glyphs/size=32".

    If a loader was passed to the run, it is the type of the loader, "Squares,
    given". For fake data it is "glyphs, fake".
    """
    if given := self.metadata.get("data_given"):
      return f"{given}, given"
    full = self.config.get("data", {}).get("dataset") or "unknown data"
    name = full if full.startswith(FOLDERS) else full.split("/")[0]
    return f"{name}, fake" if self.is_fake else name

  @property
  def is_fake(self) -> bool:
    """Whether all images were fake, see `config.fake_data`."""
    return bool(self.config.get("fake_data"))

  @functools.cached_property
  def evals(self) -> dict[str, EvaluatorConfig]:
    """Name -> options of an evaluator; those in `errors` have defaults."""
    data = self.config.get("data", {})
    return {
      e.name: e.resolved(data.get("dataset"), data.get("batch_size"))
      for e in self._built[0].evals
    }

  @property
  def errors(self) -> list[str]:
    """Errors of options that this version cannot read."""
    return [error.rstrip(".") for error in self._built[1]]

  @functools.cached_property
  def _built(self) -> tuple[Config, list[str]]:
    return build({"evals": self.config.get("evals")})

  @functools.cached_property
  def linear_probe(self) -> results.ProbeOutcome | None:
    """The linear probe from which the run started; None: there is none."""
    file = self.path / results.LINEAR_PROBE
    is_there = file.exists()
    return json_file.read_as(results.ProbeOutcome, file) if is_there else None

  @functools.cached_property
  def trials(self) -> results.Trials:
    """The short trials before the run."""
    return json_file.read_as(results.Trials, self.path / results.TRIALS)

  @property
  def steps(self) -> int:
    """Number of applied updates in the metrics."""
    return max((r["step"] for r in self.rows), default=0)

  @property
  def total_steps(self) -> int | None:
    """Length of the run in steps; None if the files do not state it."""
    return self.metadata.get("total_steps") or self.config.get("total_steps")

  @functools.cached_property
  def names(self) -> list[str]:
    """Names of all metrics, in the order of their first line."""
    return list(dict.fromkeys(k for r in self.rows for k in r))

  def points(self, name: str | None) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric, also values that are not finite.

    NaN stands for a value that the row leaves out: the row of a skipped step
    has no `train/loss`; the row of an evaluator has the number of such values
    in `<evaluator>/not_finite`.
    """
    name = name or ""
    sign = f"{name.partition('/')[0]}/not_finite"
    sign = "train/skipped" if name == LOSS else sign
    rows = [r for r in self.rows if name in r or sign in r]
    return [r["step"] for r in rows], [r.get(name, math.nan) for r in rows]

  def series(self, name: str | None) -> tuple[list[int], list[float]]:
    """Returns steps and finite values of a metric."""
    points = zip(*self.points(name), strict=True)
    points = [(s, v) for s, v in points if math.isfinite(v)]
    return [s for s, _ in points], [v for _, v in points]

  def last(self, name: str | None) -> float | None:
    """Returns the value in the last line that has the metric."""
    for row in reversed(self.rows):
      if name in row:
        return row[name] if math.isfinite(row[name]) else None
    return None

  def scores(self, name: str) -> dict[str, float | None]:
    """Returns metric -> score of an evaluator at its last step.

    A score that is not finite is None.
    """
    for row in reversed(self.rows):
      scores = {
        k.rpartition("/")[2]: v if math.isfinite(v) else None
        for k, v in row.items()
        if k.rpartition("/")[0] == name
      }
      if scores:
        return scores
    return {}

  def evaluators(self, metric: re.Pattern) -> list[str]:
    """Returns names of evaluators, in the order of the config.

    Args:
      metric: A metric that they wrote: `TOP1`, `R2` or `SHOT`.
    """
    matches = [metric.fullmatch(n) for n in self.names]
    written = dict.fromkeys(m["name"] for m in matches if m)
    return [n for n in self.evals if n in written] + [
      n for n in written if n not in self.evals
    ]

  @functools.cached_property
  def groups(self) -> dict[str, list[str]]:
    """Name of a group with a mean -> names of its evaluators."""
    written = {n.split("/")[0] for n in self.names}
    return {
      group: [e.name for e in members if e.name in written]
      for group, members in groups(self.evals.values()).items()
      if group in written
    }

  def fewshot_names(self) -> list[str]:
    """Returns the names of few-shot evaluators, with groups as one name."""
    members = {n for names in self.groups.values() for n in names}
    return [n for n in self.evaluators(SHOT) if n not in members]

  def split_title(self, name: str) -> str:
    """Returns the name of an evaluator with data set and split, if known.

    The name is the key in `config.evals`, as in the log, metrics.jsonl,
    TensorBoard and summary.json.
    """
    data = self.data_title(name)
    return f"{name} ({data})" if data != name else name

  def data_title(self, name: str) -> str:
    """Returns data set and split of an evaluator; if unknown, its name."""
    fake = ", fake" * self.is_fake
    if name in self.groups:
      num = len(self.groups[name])
      return f"mean of {num} data set{'s' * (num > 1)}{fake}"
    if (e := self.evals.get(name)) is None:
      return name
    return f"{short_name(e.dataset or name)} {e.split}{fake}"

  def top1_title(self, name: str) -> str:
    """Returns `split_title`, with the kind of classifier if not the head."""
    text, options = self.split_title(name), self.evals.get(name)
    if options is None or options.kind in ("classification", "per_class"):
      return text
    if options.kind == "subset":
      return f"{text}, among the classes of {options.classes}"
    return f"{text}, {options.kind}{'' if options.scores_head else ' probe'}"

  def is_on_training_data(self, name: str) -> bool:
    """Whether an evaluator scores images of the data set of the training."""
    if self.metadata.get("data_given") or name not in self.evals:
      return False
    whole = with_absolute_folder
    trained = self.config.get("data", {}).get("dataset")
    return whole(self.evals[name].dataset) == whole(trained)

  def is_training_part(self, name: str) -> bool:
    """Whether an evaluator scores a part of the training split."""
    if not self.is_on_training_data(name):
      return False
    split = str(self.config.get("data", {}).get("split"))
    of_eval = self.evals[name].split
    whole = lambda split: split.partition("@")[0].partition("[")[0]
    return whole(of_eval) == whole(split) or (split, whole(of_eval)) == VTAB

  def is_held_out(self, name: str) -> bool:
    """Whether an evaluator scores a part that was held out of the training."""
    if not self.is_training_part(name):
      return False
    split, of_eval = str(self.config["data"]["split"]), self.evals[name].split
    return (split, of_eval) == VTAB or splits.are_apart(split, of_eval)

  def top1(self) -> str | None:
    """Returns the name of the metric that represents the run."""
    names = self.evaluators(TOP1)
    return f"{names[0]}/top1" if names else None

  def fewshot(self, name: str, of: str = "") -> dict[str, dict[str, float]]:
    """Returns the last accuracies by L2 weight, then by shots.

    Args:
      name: Name of the evaluator.
      of: "" for the features of the run, or a baseline such as "raw_pixels".

    Returns:
      {"16": {"1": 0.5, "5": 0.7}, "1024": ...}, with the first weight of the
      config first ("?" if it is unknown); {} if there are no accuracies.
    """
    options = self.evals.get(self.groups.get(name, [name])[0])
    first = f"{options.l2[0]:g}" if options and options.l2 else "?"
    prefix = re.escape(f"{name}/{of}/" if of else f"{name}/")
    pattern = re.compile(
      prefix + r"(?:l2=(?P<l2>[^/]+)/)?(?P<shots>[0-9]{1,6})shot"
    )
    matches = [m for m in map(pattern.fullmatch, self.names) if m]
    matches.sort(key=lambda m: (m["l2"] is not None, int(m["shots"])))
    accuracies: dict[str, dict[str, float]] = {}
    for match in matches:
      value = self.last(match[0])
      if value is not None:
        by_shots = accuracies.setdefault(match["l2"] or first, {})
        by_shots[match["shots"]] = value
    return accuracies

  @property
  def seconds(self) -> dict[str, float]:
    """Seconds in each of `accounting.BUCKETS`; {} if they were not recorded.

    The latest record counts: at the end, in the newest checkpoint or in the
    newest training row.
    """
    return max(
      accounting.seconds_of_rows(self.rows),
      accounting.seconds_of_metadata(self.metadata),
      key=lambda seconds: sum(seconds.values()),
    )

  @property
  def device_hours(self) -> float | None:
    """Device-hours, from the same record as `seconds`."""
    account = self.metadata.get(accounting.KEY) or {}
    hours = account.get("device_hours"), self.last("train/device_hours")
    return max((h for h in hours if h is not None), default=None)

  def wall_seconds(self) -> float | None:
    """Returns the seconds from the first start to the record of `seconds`.

    Without a record, it is the time from the first row to the last. Both
    include pauses.
    """
    if seconds := self.seconds:
      return sum(seconds.values())
    times = [r["time"] for r in self.rows if "time" in r]
    return times[-1] - times[0] if len(times) > 1 else None


def find_runs(*folders: str | pathlib.Path) -> list[Run]:
  """Reads runs, or all runs directly below a folder.

  Args:
    *folders: Workdirs of runs, or folders of such, on this machine.

  Returns:
    The runs, each once, in the order of the folders; runs below a folder are
    ordered by name.

  Raises:
    ValueError: One of the folders has no run.
  """
  paths: dict[pathlib.Path, pathlib.Path] = {}
  for folder in folders:
    if is_remote(folder):
      raise ValueError(f"got {str(folder)!r}, expected a local folder.")
    base = pathlib.Path(folder)
    inside = sorted(base.iterdir()) if base.is_dir() else []
    workdirs = [p for p in ([base] if _is_run(base) else inside) if _is_run(p)]
    if not workdirs:
      raise ValueError(f"got {str(base)!r}, expected a folder of runs.")
    paths |= {p.resolve(): p for p in workdirs if p.resolve() not in paths}
  names = unique_names(list(paths))
  return [_read(p, name) for p, name in zip(paths.values(), names, strict=True)]


def unique_names(paths: Sequence[pathlib.PurePath]) -> list[str]:
  """Returns the names of folders, with folders above them to be unique.

  Example:
    >>> P = pathlib.PurePath
    >>> unique_names([P("/runs/a/x"), P("/runs/b/x"), P("/runs/y")])
    ['a/x', 'b/x', 'y']
  """
  lengths = [1] * len(paths)
  while True:
    names = [
      "/".join(p.parts[-n:]) for p, n in zip(paths, lengths, strict=True)
    ]
    longer = [
      i
      for i, name in enumerate(names)
      if names.count(name) > 1 and lengths[i] < len(paths[i].parts)
    ]
    if not longer:
      return names
    for i in longer:
      lengths[i] += 1


def short_name(dataset: str) -> str:
  """Returns the name of a data set without its options or path.

  Example:
    >>> short_name("glyphs/size=32"), short_name("folder:/data/flowers/")
    ('glyphs', 'flowers')
  """
  if dataset.startswith(FOLDERS):
    path = with_options(dataset)[0].partition(":")[2]
    return pathlib.PurePath(path).name or dataset
  return dataset.split("/")[0]


def _is_run(path: pathlib.Path) -> bool:
  # A folder of published weights has only probes.
  if any((path / file).exists() for file in (METRICS, PROBES)):
    return True
  # Folders of timm and Hugging Face have another config.json.
  is_weights = any(path.glob("*.safetensors"))
  return (path / "config.json").exists() and not is_weights


def _read(path: pathlib.Path, name: str) -> Run:
  """Reads a run.

  Raises:
    ValueError: A file of the run is damaged.
  """
  metadata = json_file.read(path / "metadata.json")
  rows, unread = atomic_files.read_rows(epath.Path(path / METRICS))
  lives = run_record.intervals(path)
  return Run(
    name,
    path,
    json_file.read(path / "config.json") or metadata.get("config") or {},
    metadata,
    rows,
    run_record.read(path / run_record.FILE),
    lives[-1][1] if lives else None,
    unread,
  )

"""The points of a search, their checks, and the choice of the best point."""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax import experiment
from vit_jax.checkpointing import layout, resume_rules
from vit_jax.config import (
  HELD_OUT,
  Config,
  ConfigError,
  build,
  cli,
  json_file,
  to_dict,
)
from vit_jax.config.checks import errors as config_errors
from vit_jax.data.sources import Sources
from vit_jax.finetune.one_run import RESULT
from vit_jax.paths import absolute
from vit_jax.tools.sweep.splits import joined, num_shared

FINAL = "final"  # folder of the run that is scored on the test data
LONGEST = 200  # bytes of a folder's name; file systems take 255
# Options that decide which data are held out, and what is scored.
NOT_SEARCHED = (
  *("evals", "fake_data"),
  *("data.dataset", "data.split", "data.data_dir"),
)
# A resumed run may change these, but they change what a point scores.
SCORE_OPTIONS = ("evals.", "fewshot", "on_nonfinite", "total_")


@dataclasses.dataclass(frozen=True)
class Result:
  """Contents of `RESULT`.

  scores: Name -> value of the metrics at the last step.
  step: The last step.
  error: Why the run diverged; None: it did not diverge.
  """

  scores: dict[str, float] = dataclasses.field(default_factory=dict)
  step: int | None = None
  error: str | None = None


class Task(NamedTuple):
  """One search: a config and a grid.

  Attributes:
    config: Config whose evaluator `val` scores held-out images.
    grid: Option without "config." -> values to try, as texts.
    group: Name of a group of tasks, whose mean is in the table.
  """

  config: Config
  grid: Mapping[str, Sequence[str]]
  group: str = ""


class Point(NamedTuple):
  """One run of a search.

  Attributes:
    name: Name of its folder, such as "optim.lr=0.01,total_steps=500".
    values: Option -> value, as text.
    config: Config of the run; `val` is its only evaluator.
  """

  name: str
  values: dict[str, str]
  config: Config


def grid_of(text: str | None, source: str) -> dict[str, Sequence[str]]:
  """Returns option -> values as texts.

  Args:
    text: Lines of option=value,value. None: the result of `get_grid` of the
      config file, {} if there is no such function.
    source: The config file and its argument.

  Raises:
    ConfigError: An option occurs twice, or has no list of values.

  Example:
    >>> grid_of("optim.lr=0.1,0.3\\ndata.ops=decode|resize((8, 8))", "")
    {'optim.lr': ['0.1', '0.3'], 'data.ops': ['decode|resize((8, 8))']}
  """
  if text is None:
    grid = cli.ask(source, "get_grid") or {}
    if odd := [k for k, v in grid.items() if not isinstance(v, tuple | list)]:
      raise ConfigError(
        [
          f"--config={source}: got {grid[k]!r} for {k!r} from get_grid,"
          " expected a tuple."
          for k in odd
        ]
      )
    return {k: [str(v) for v in values] for k, values in grid.items()}
  grid: dict[str, Sequence[str]] = {}
  for line in text.splitlines():
    key, _, values = line.partition("=")
    key = key.removeprefix("config.")
    if key in grid:
      raise ConfigError(
        [
          f"--grid: got {key!r} twice, expected all of its values in one"
          f" --grid={key}={','.join(grid[key])},{values}."
        ]
      )
    texts = map(str.strip, re.split(r",(?![^(]*\))", values))
    grid[key] = [text for text in texts if text]
  return grid


def with_fixed_init(task: Task, folder: epath.Path) -> Task:
  """Returns the search, with `init` set to one step of the run that it names.

  Thus all points begin from the same weights, even if that run is still
  training. A continued search uses the step of its first run. An `init` that is
  no run is not changed.

  Args:
    task: The search.
    folder: Folder of its runs.
  """
  init = (task.config.init or "").rstrip("/")
  if not init or "init" in task.grid:
    return task
  earlier = (
    str(_config_in(path.parent).get("init"))
    for path in sorted(folder.glob(f"*/{resume_rules.CONFIG}"))
  )
  step = next((x for x in earlier if f"{x}/".startswith(f"{init}/")), None)
  if step is None and epath.Path(init).is_dir():
    with contextlib.suppress(OSError, ValueError):  # reported by `check`
      newest = layout.find(init).relative_to(absolute(epath.Path(init)))
      step = str(epath.Path(init) / newest)
  config = dataclasses.replace(task.config, init=step or init)
  return task._replace(config=config)


def points(task: Task) -> list[Point]:
  """Returns all combinations of the values; the last option changes fastest.

  Raises:
    ConfigError: An option does not exist, or a value has a wrong type.
  """
  config, every, errors = task.config, [], []
  held_out = tuple(e for e in config.evals if e.name == HELD_OUT)
  base = dataclasses.replace(config, evals=held_out)
  for values in itertools.product(*task.grid.values()):
    named = dict(zip(task.grid, values, strict=True))
    name = ",".join(f"{k}={v}" for k, v in named.items()) or "point"
    as_dict = to_dict(base)
    more = cli.override_all(as_dict, named)
    built, others = build(as_dict)
    errors += [f"--grid: {error}" for error in [*more, *others]]
    every.append(Point(_folder_name(name), named, built))
  if errors:
    raise ConfigError(dict.fromkeys(errors))
  return every


def _folder_name(name: str) -> str:
  """Returns a name that a file can have, of at most `LONGEST` bytes."""
  short = re.sub(r"[^\w.=,+-]", "_", name).encode()
  if len(short) <= LONGEST:
    return short.decode()
  digest = hashlib.sha256(name.encode()).hexdigest()[:8]
  return f"{short[: LONGEST - 9].decode(errors='ignore')}-{digest}"


def best_point(rows: Sequence[Mapping[str, Any]]) -> str | None:
  """Returns the name of the best point; None if all diverged.

  The best point has the highest top-1 of `val` after its last step. Among equal
  top-1, which occur on 200 images, the lower loss is better, then the earlier
  point. A value that is not finite is the worst.
  """
  alive = [r for r in rows if r["error"] is None]
  if not alive:
    return None
  top1, loss = f"{HELD_OUT}/top1", f"{HELD_OUT}/loss"

  def rank(row):
    scores = row["scores"]
    return scores.get(top1, -math.inf), -scores.get(loss, math.inf)

  return max(alive, key=rank)["name"]


def final_config(config: Config, best: Config) -> Config:
  """Returns the config of the run that is scored on the test data.

  It has the options of the best point, all training data, and all evaluators of
  the config except `val`, each once, at the end.
  """
  (held_out,) = best.evals
  tests = tuple(
    dataclasses.replace(e, every_steps=0)
    for e in config.evals
    if e.name != HELD_OUT
  )
  split = joined(config.data.split, held_out.split)
  data = dataclasses.replace(best.data, split=split)
  return dataclasses.replace(best, data=data, evals=tests)


def check(task: Task, folder: epath.Path) -> list[str]:
  """Returns all errors of a search.

  Some would let it run, but with a result that means nothing.
  """
  if errors := [*_evaluator_errors(task.config), *_grid_errors(task.grid)]:
    return errors
  try:
    every = points(task)
  except ConfigError as e:
    return list(e.errors)
  names = [point.name for point in every]
  errors += [
    f"--grid: got two points for the folder {name!r}, expected different"
    " values, each once; what a file's name cannot have counts as '_'."
    for name in dict.fromkeys(names)
    if names.count(name) > 1
  ]
  for point in every:
    errors += [
      f"{point.name}: {error}" for error in config_errors(point.config)
    ]
    errors += other_run_errors(point.config, folder / point.name)
  done = [(folder / p.name / RESULT).exists() for p in every]
  if (folder / FINAL / RESULT).exists() and not all(done):
    errors.append(
      f"--grid: got points that are not in {folder}, whose best point is scored"
      " on the test data already; a longer search could choose by the test"
      " data. Use another --workdir."
    )
  errors = errors or _scored_errors(task, every, folder)
  if errors:
    return errors
  sources = Sources(task.config.data.data_dir, fake=task.config.fake_data)
  try:
    errors += _shared_errors(task.config, sources)
    experiment.setup(task.config, sources=sources)
    experiment.setup(
      final_config(task.config, every[0].config), sources=sources
    )
  except ConfigError as e:
    errors += e.errors
  for point in _distinct(every)[1:]:  # the first is checked above
    try:
      experiment.setup(point.config, sources=sources)
    except ConfigError as e:
      errors += [
        f"{point.name}: {error}" for error in e.errors if error not in errors
      ]
  return errors


def _scored_errors(
  task: Task, every: Sequence[Point], folder: epath.Path
) -> list[str]:
  """Returns the errors of results, and differences to the scored run."""
  results, errors = {}, []
  for name in [*(p.name for p in every), FINAL]:
    path = folder / name / RESULT
    try:
      if path.exists():
        results[name] = json_file.read_as(Result, path)
    except ValueError as e:
      errors.append(f"{e} Or delete {folder / name} to train this run again.")
  if errors or FINAL not in results:
    return errors
  best = best_point(
    [{"name": p.name, **dataclasses.asdict(results[p.name])} for p in every]
  )
  return [
    f"{c.text}: the run in {folder / FINAL} has another value, and is scored on"
    " the test data already; use another --workdir."
    for p in every
    if p.name == best
    for c in _meaningful_changes(
      final_config(task.config, p.config), folder / FINAL
    )
  ]


def _distinct(points: Sequence[Point]) -> list[Point]:
  """Returns one of the points that differ only in the learning rate.

  The check of a point takes seconds, because it reads the weights.
  """
  first_of_group: dict[str, Point] = {}
  for point in points:
    optim = dataclasses.replace(point.config.optim, lr=1.0)
    others = dataclasses.replace(point.config, optim=optim)
    first_of_group.setdefault(repr(others), point)
  return [*first_of_group.values()]


def other_run_errors(config: Config, folder: epath.Path) -> list[str]:
  """Returns errors if the folder has a run with another config."""
  return [
    f"{change.text}: the run in {folder} has another value; use another"
    " --workdir, or delete this folder."
    for change in _meaningful_changes(config, folder)
  ]


def _meaningful_changes(
  config: Config, folder: epath.Path
) -> list[resume_rules.Change]:
  """Returns the differences between a run and the run in a folder, if any."""
  old = _config_in(folder)
  return [
    change
    for change in (resume_rules.differences(old, config) if old else ())
    if change.rule.makes_another_run or change.key.startswith(SCORE_OPTIONS)
  ]


def _config_in(folder: epath.Path) -> dict[str, Any]:
  """Returns the config of the run in a folder; {} without a run."""
  try:
    return json_file.read(folder / resume_rules.CONFIG)
  except ValueError:  # damaged; the run itself reports it
    return {}


def other_records_errors(
  known: Mapping[str, Any], current: Mapping[str, Any], folder: epath.Path
) -> list[str]:
  """Returns an error for each split whose records changed during the search.

  Otherwise finished points would be compared with points on other data. The
  test data may change until they are scored.

  Args:
    known: Result of `splits.digests` when the search began; {}: it begins now.
    current: Result of `splits.digests` now, for the same splits and more.
    folder: Folder of the search.
  """
  return [
    f"config.data.dataset: got {now['dataset']!r} [{now['split']}] with other"
    f" records than when the search in {folder} began, so its points would not"
    " be compared on the same data; use another --workdir, or delete this"
    " folder."
    for name in ("train", HELD_OUT)
    if (was := known.get(name))
    for now in [current[name]]
    if all(was[k] == now[k] for k in ("dataset", "split"))
    and any(was.get(k) != now.get(k) for k in ("records", "sha256"))
  ]


def _evaluator_errors(config: Config) -> list[str]:
  names = [e.name for e in config.evals]
  if HELD_OUT not in names:
    return [
      f"config.evals: got {', '.join(names) or 'no evaluator'}, expected one"
      f" named {HELD_OUT!r} that scores a held-out part of the training data,"
      " as in configs/finetune.py; points are not chosen by the test data."
    ]
  errors, where = [], f"config.evals.{HELD_OUT}"
  held_out = config.evals[names.index(HELD_OUT)]
  has_top1 = held_out.scores_head and not held_out.scores_numbers
  if not has_top1 or held_out.kind == "multilabel":
    errors.append(
      f"{where}.kind: got {held_out.kind!r}, expected 'classification', because"
      " points are chosen by top-1."
    )
  if held_out.dataset not in (None, config.data.dataset):
    errors.append(
      f"{where}.dataset: got {held_out.dataset!r}, expected"
      f" {config.data.dataset!r} (None), because the best point is trained on"
      " the held-out part, too."
    )
  for key, split in (("data", config.data.split), (where[7:], held_out.split)):
    if "@" in split:
      errors.append(
        f"config.{key}.split: got {split!r}, a subset, which cannot be joined"
        " with another split for the last training; expected a split without"
        " '@'."
      )
  if len(names) < 2:
    errors.append(
      f"config.evals: got only {HELD_OUT}, expected another evaluator, which"
      " scores the best point once at the end."
    )
  return errors


def _grid_errors(grid: Mapping[str, Sequence[str]]) -> list[str]:
  if not grid:
    return [
      "--grid: got no grid, and the config file has no get_grid; expected one,"
      " such as --grid=optim.lr=0.001,0.003,0.01,0.03."
    ]
  return [
    f"--grid: got {key!r}, expected an option other than"
    f" {', '.join(NOT_SEARCHED)}, because all points are compared on the same"
    " data."
    for key in grid
    if key in NOT_SEARCHED or key.startswith("evals.")
  ] + [
    f"--grid: got {key!r} without a value, expected one or more."
    for key, values in grid.items()
    if not values
  ]


def _shared_errors(config: Config, sources: Sources) -> list[str]:
  """Returns errors for splits that share records with the training data."""
  splits = {"config.data.split": config.data.split}
  splits |= {
    f"config.evals.{e.name}.split": e.split
    for e in sorted(config.evals, key=lambda e: e.name != HELD_OUT)
    if e.dataset in (None, config.data.dataset)
  }
  errors = []
  for a, b in itertools.combinations(splits, 2):
    held_out = f"config.evals.{HELD_OUT}.split"
    if "config.data.split" not in (a, b) and held_out not in (a, b):
      continue
    try:
      shared = num_shared(sources, config.data.dataset, splits[a], splits[b])
    except ValueError:
      continue  # reported by `experiment.setup`
    if shared:
      errors.append(
        f"{b}: got {splits[b]!r}, which shares {shared:,} records with"
        f" {splits[a]!r} of {a}; expected none."
      )
  return errors

"""The points of a search, its checks and splits, and the choice of the best."""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax import run_checks
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
from vit_jax.data import vtab
from vit_jax.data.sources import Sources
from vit_jax.data.splits import Span, parse_draw, parse_split
from vit_jax.finetune.one_run import RESULT
from vit_jax.options import unexpected
from vit_jax.paths import absolute

FINAL = "final"  # folder of the run that is scored on the test data
LONGEST = 200  # bytes of a folder's name; file systems take 255
# Options that decide which data are held out, and what is scored.
NOT_SEARCHED = (
  *("evals", "fake_data"),
  *("data.dataset", "data.split", "data.data_dir"),
)
# A resumed run may change these, but they change what a point scores.
SCORE_OPTIONS = ("evals.", "fewshot", "on_nonfinite", "total_")
_HALF = re.compile(r"([\w.-]+)\[(?::([^:\]]+)|([^:\]]+):)\]")


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
    for key, values in grid.items():
      if not isinstance(values, tuple | list):
        where = f"get_grid of {source}: {key}"
        raise ConfigError([unexpected(where, repr(values), "a tuple")])
    return {k: [str(v) for v in values] for k, values in grid.items()}
  grid: dict[str, Sequence[str]] = {}
  for line in text.splitlines():
    key, _, values = line.partition("=")
    key = key.removeprefix("config.")
    if key in grid:
      expected = f"--grid={key}={','.join(grid[key])},{values}"
      raise ConfigError([unexpected("--grid", f"{key!r} twice", expected)])
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
    unexpected("--grid", f"two points for the folder {name!r}", "one")
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
      f"--grid: got new points, but the best point in {folder} is scored on the"
      " test data already; expected another --workdir."
    )
  if errors:
    return errors
  sources = Sources(task.config.data.data_dir, fake=task.config.fake_data)
  errors += _shared_errors(task.config, sources)
  # Points that differ only in the learning rate are checked once, because a
  # check reads the weights, which takes seconds.
  distinct = {}
  for p in every:
    optim = dataclasses.replace(p.config.optim, lr=1.0)
    distinct.setdefault(dataclasses.replace(p.config, optim=optim), p)
  last = Point("", {}, final_config(task.config, every[0].config))
  for point in [last, *distinct.values()]:
    try:
      run_checks.setup(point.config, sources=sources)
    except ConfigError as e:
      prefix = point.name and f"{point.name}: "
      errors += [prefix + error for error in e.errors if error not in errors]
  return errors


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


def records_of(config: Config, sources: Sources) -> dict[str, Any]:
  """Returns what the training data and each evaluator's data are.

  Returns:
    "train" or name of the evaluator -> dataset, split, number of `records`, and
    `identity` of the records, see `Source`.
  """
  wanted = {"train": (config.data.dataset, config.data.split)}
  wanted |= {
    e.name: (e.dataset or config.data.dataset, e.split) for e in config.evals
  }
  every = {}
  for name, (dataset, split) in wanted.items():
    source = sources.open(dataset, split)
    every[name] = {
      "dataset": dataset,
      "split": split,
      "records": source.num_examples,
      "identity": source.identity(),
    }
  return every


def _evaluator_errors(config: Config) -> list[str]:
  names = [e.name for e in config.evals]
  if HELD_OUT not in names or len(names) < 2:
    expected = f"{HELD_OUT!r}, and another one that scores the best point"
    return [unexpected("config.evals", ", ".join(names) or "none", expected)]
  errors, where = [], f"config.evals.{HELD_OUT}"
  held_out = config.evals[names.index(HELD_OUT)]
  has_top1 = held_out.scores_head and not held_out.scores_numbers
  if not has_top1 or held_out.kind == "multilabel":
    expected = "'classification', because points are chosen by top-1"
    errors.append(unexpected(f"{where}.kind", repr(held_out.kind), expected))
  if held_out.dataset not in (None, config.data.dataset):
    expected = "None, because the best point is trained on it, too"
    errors.append(
      unexpected(f"{where}.dataset", repr(held_out.dataset), expected)
    )
  for key, split in (
    (where, held_out.split),
    ("config.data", config.data.split),
  ):
    if "@" in split:
      expected = "a split without '@', which can be joined with another"
      errors.append(unexpected(f"{key}.split", repr(split), expected))
  return errors


def _grid_errors(grid: Mapping[str, Sequence[str]]) -> list[str]:
  if not grid:
    return [unexpected("--grid", "none", "such as optim.lr=0.003,0.01,0.03")]
  expected = f"another option than {', '.join(NOT_SEARCHED)}"
  return [
    unexpected("--grid", repr(key), expected)
    for key in grid
    if key in NOT_SEARCHED or key.startswith("evals.")
  ] + [
    unexpected("--grid", f"{key!r} without a value", "one or more")
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
      continue  # reported by `run_checks.setup`
    if shared:
      expected = f"no records of {a}={splits[a]!r}: it has {shared:,} of them"
      errors.append(unexpected(b, repr(splits[b]), expected))
  return errors


def joined(split: str, held_out: str) -> str:
  """Returns the union of both splits; the records of `split` come first.

  Example:
    >>> joined("train[:98%]", "train[98%:]"), joined("train800", "val200")
    ('train', 'train800+val200')
  """
  first, second = _HALF.fullmatch(split), _HALF.fullmatch(held_out)
  if first and second and first[1] == second[1]:
    if first[2] and first[2] == second[3]:
      return first[1]
  return f"{split}+{held_out}"


def num_shared(sources: Sources, dataset: str, a: str, b: str) -> int:
  """Returns the number of records that two splits of a data set share.

  A subset such as train@2000 counts as the split from which it is drawn.

  Args:
    sources: Opens the splits.
    dataset: Name of the data set.
    a: Name of a split.
    b: Name of another split.

  Raises:
    ValueError: The data set or a split is unknown.
  """
  a, b = (parse_draw(split)[0] for split in (a, b))  # drawn from the others
  return sum(
    max(0, min(x.stop, y.stop) - max(x.start, y.start))
    for x in _spans(sources, dataset, a)
    for y in _spans(sources, dataset, b)
    if x.split == y.split
  )


def _spans(sources: Sources, dataset: str, split: str) -> tuple[Span, ...]:
  """Returns the records of a split, as parts of splits that share none."""
  task = vtab.TASKS.get(dataset.removeprefix(vtab.PREFIX))
  if task and dataset.startswith(vtab.PREFIX):
    return task.spans(split)  # train800val200 has the records of val200
  names = {part.split("[")[0].strip() for part in split.split("+")}
  sizes = {n: sources.inspect(dataset, n).num_examples for n in names}
  return parse_split(split, sizes)

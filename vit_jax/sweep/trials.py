"""Short trials before a run: what suits the data is chosen on held-out images.

A config file asks for them by a function `get_trials(argument)` beside its
`get_config`, which returns candidates: name -> options. They are compared by
successive halving: every candidate is trained for n steps, the best third for
3 n, the best of these for 9 n, until two are left, of which the better is
chosen. Each trial begins anew with the same weights, and with a schedule as
long as itself; the evaluator `val` scores it at its end.

Source: arXiv:1502.07943.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import linear_probe
from vit_jax.config import (
  HELD_OUT,
  Config,
  ConfigError,
  build,
  cli,
  json_file,
  to_dict,
)
from vit_jax.sweep.points import best_point
from vit_jax.sweep.sweep import run
from vit_jax.writers import run_info
from vit_jax.writers.metric_writer import read_metrics

FOLDER, FILE = "trials", "trials.json"  # in the workdir
LOG = "log.txt"  # in the folder of a trial: what it prints
PROBE, TIMED = "probe", "timed"  # trials that come first
SHARE = 3  # one of so many candidates goes on, with so many times the steps
FEWEST_STEPS = 20  # of a trial

Options = Mapping[str, Any]  # option without "config." -> value


@dataclasses.dataclass(frozen=True)
class Record:
  """Contents of `FILE`.

  steps: Steps of the first trials; they stay the same when the run resumes.
  trials: Those made so far: "candidate", "steps", "scores" by name.
  chosen: The best candidate; None: not known yet.
  """

  steps: int
  trials: tuple[dict[str, Any], ...] = ()
  chosen: str | None = None


def choose(
  config: Config,
  candidates: Mapping[str, Options],
  seconds: float,
  workdir: str,
) -> Config:
  """Returns the config with the options of the best candidate.

  The same call after an interruption goes on with the trial that is missing.

  Args:
    config: The run.
    candidates: Name -> the options that it sets.
    seconds: Time of all trials together, about: the number of steps is
      derived from it once, by the clock, and then stays.
    workdir: Folder of the run.

  Raises:
    ConfigError: A candidate sets an option that does not exist, or cannot work.
  """
  folder = epath.Path(workdir)
  configs = {name: _with(config, o) for name, o in candidates.items()}
  sizes = _rung_sizes(len(configs))
  if (folder / FILE).exists():
    record = json_file.read_as(Record, folder / FILE)
  else:
    _print(
      f"trials      {sum(sizes)} in about {seconds / 60:g} minutes, scored on"
      f" the held-out images: " + "; ".join(candidates)
    )
    steps = _affordable_steps(config, folder / FOLDER, seconds, sizes)
    record = Record(steps)
    _write(folder, record)
  if record.steps < FEWEST_STEPS:
    _print(f"trials      none: {seconds:g} s are too short for any")
    return config
  if record.chosen in configs:
    return configs[record.chosen]
  rows, left = [], [*configs]
  for rung, size in enumerate(sizes):
    steps = record.steps * SHARE**rung
    of_rung = []
    for name in left[:size]:
      trial = _from_probe(_short(configs[name], steps), folder / FOLDER)
      result = _trial(trial, folder / FOLDER / f"{steps}_{name}", name)
      of_rung.append({"name": name, **result})
      rows.append({"candidate": name, "steps": steps, **result})
      _write(folder, dataclasses.replace(record, trials=tuple(rows)))
    left = _ranked(of_rung)
  record = dataclasses.replace(record, trials=tuple(rows), chosen=left[0])
  _write(folder, record)
  _print(f"chosen      {left[0]}")
  return configs[left[0]]


def free(
  candidates: Mapping[str, Options], fixed: Collection[str]
) -> dict[str, Options]:
  """Returns the candidates that set no option which the user has set."""
  return {k: o for k, o in candidates.items() if not {*o} & {*fixed}}


def _ranked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the names of trials, the best first, by `points.best_point`."""
  rows, names = [*rows], []
  while best := best_point(rows):
    names.append(best)
    rows = [row for row in rows if row["name"] != best]
  return names + [row["name"] for row in rows]  # these diverged


def _rung_sizes(num_candidates: int) -> list[int]:
  """Returns how many candidates each rung has.

  Example:
    >>> _rung_sizes(16), _rung_sizes(3), _rung_sizes(1)
    ([16, 5, 2], [3, 2], [1])
  """
  sizes = [num_candidates]
  while sizes[-1] > 2:
    sizes.append(max(2, sizes[-1] // SHARE))
  return sizes


def _affordable_steps(
  config: Config, folder: epath.Path, seconds: float, sizes: Sequence[int]
) -> int:
  """Returns the steps of the first trials that the time allows.

  The first trial fits the linear probe with which all others begin; a second
  one of `FEWEST_STEPS` is timed.
  """
  _trial(_short(config, 1), folder / PROBE, PROBE)
  began = time.monotonic()
  timed = _from_probe(_short(config, FEWEST_STEPS), folder)
  _trial(timed, folder / TIMED, TIMED)
  total = time.monotonic() - began
  rates = [
    row["train/images_per_second"]
    for row in read_metrics(str(folder / TIMED))
    if "train/images_per_second" in row
  ]
  step = config.data.batch_size / rates[-1]
  start = max(0.0, total - FEWEST_STEPS * step)  # of a trial
  num_steps = sum(size * SHARE**rung for rung, size in enumerate(sizes))
  return max(0, int((seconds - sum(sizes) * start) / step / num_steps))


def _short(config: Config, steps: int) -> Config:
  """Returns a run of a few steps that is scored once, on what is held out."""
  return dataclasses.replace(
    config,
    total_steps=steps,
    total_epochs=None,
    log_steps=steps,
    optim=dataclasses.replace(config.optim, warmup_steps=steps // 10),
    checkpoint=dataclasses.replace(config.checkpoint, every_steps=0),
    evals=tuple(
      dataclasses.replace(e, every_steps=0)
      for e in config.evals
      if e.name == HELD_OUT
    ),
    trackers=(),
  )


def _from_probe(config: Config, folder: epath.Path) -> Config:
  """Returns a trial that begins with the linear probe of the first one."""
  probe = folder / PROBE / linear_probe.FOLDER
  return dataclasses.replace(config, init=str(probe), init_head="zeros")


def _trial(config: Config, folder: epath.Path, name: str) -> dict[str, Any]:
  """Trains a trial unless it has its result; see `sweep.run`."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / LOG).open("a") as log, contextlib.redirect_stdout(log):
    with contextlib.redirect_stderr(log):
      result = run(config, folder, keeps_weights=False)
  top1 = result["scores"].get(f"{HELD_OUT}/top1")
  text = "diverged" if top1 is None else f"{HELD_OUT} {top1:.2%}"
  _print(f"trial       {text} after {config.total_steps:,} steps: {name}")
  return result


def _with(config: Config, options: Options) -> Config:
  """Returns the config with some options set.

  Raises:
    ConfigError: An option does not exist, or a value is not of its type.
  """
  values = to_dict(config)
  for key, value in options.items():
    cli.override(values, key, value)
  built, errors = build(values)
  if errors:
    raise ConfigError([f"get_trials: {error}" for error in errors])
  return built


def _write(folder: epath.Path, record: Record) -> None:
  if jax.process_index() == 0:
    run_info.write_json(str(folder), FILE, dataclasses.asdict(record))


def _print(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)

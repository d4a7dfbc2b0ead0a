"""Short trials before a run: what suits the data is chosen on held-out images.

A config file asks for them by a function `get_trials(argument)` beside its
`get_config`, which returns candidates, name -> options, and a budget. They are
compared by successive halving: every candidate is trained for n steps, the best
third for 3 n, the best of these for 9 n, until two are left, of which the
better is chosen. Each trial begins anew with the same linear probe, and with a
schedule as long as itself; the evaluator `val` scores it at its end.

Source: arXiv:1502.07943.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import experiment, linear_probe
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
from vit_jax.writers.fine_tuning import TRIALS, Trial, Trials
from vit_jax.writers.metric_writer import read_metrics

FOLDER = "trials"  # in the workdir
LOG = "log.txt"  # in the folder of a trial: what it prints
PROBE, TIMED = "probe", "timed"  # trials that come first
TOP1 = f"{HELD_OUT}/top1"
SHARE = 3  # one of so many candidates goes on, with so many times the steps
FEWEST_STEPS = 20  # of a trial

Options = Mapping[str, Any]  # option without "config." -> value


def choose(
  config: Config,
  candidates: Mapping[str, Options],
  budget: str,
  workdir: str,
) -> Config:
  """Returns the config with the options of the best candidate.

  The same call after an interruption goes on with the trial that is missing.

  Args:
    config: The run.
    candidates: Name -> the options that it sets.
    budget: All steps of the trials together, "2000"; or their time, "10m" or
      "90s", from which the steps are derived once, by the clock. They are
      logged: with them as the budget, another run has the same trials.
    workdir: Folder of the run.

  Raises:
    ConfigError: A candidate sets an option that does not exist, or cannot work.
  """
  folder = epath.Path(workdir)
  configs = {name: _with(config, o) for name, o in candidates.items()}
  for candidate in configs.values():
    experiment.setup(candidate)
  sizes = _rung_sizes(len(configs))
  if (folder / TRIALS).exists():
    record = json_file.read_as(Trials, folder / TRIALS)
  else:
    _print(
      f"trials      {sum(sizes)} short ones within {_in_words(budget)} choose"
      f" on held-out images between: {'; '.join(candidates)}"
    )
    _run(_short(config, 1), folder / FOLDER / PROBE, PROBE)
    per_step = sum(size * SHARE**rung for rung, size in enumerate(sizes))
    total = (
      int(budget)
      if budget.isdecimal()
      else _affordable_steps(config, folder / FOLDER, budget, sum(sizes))
    )
    record = Trials(total // per_step)
    _print(
      f"trials      of {record.steps:,} to"
      f" {record.steps * SHARE ** (len(sizes) - 1):,} steps, together"
      f" {total:,} (budget={total} repeats them)"
    )
    _write(folder, record)
  if record.steps < FEWEST_STEPS:
    _print(
      f"trials      none: {FEWEST_STEPS} steps each are the fewest that tell"
      f" candidates apart; raise the budget to at least"
      f" {FEWEST_STEPS * per_step:,} steps"
    )
    return config
  if record.chosen in configs:
    return configs[record.chosen]
  trials, left = [], [*configs]
  for rung, size in enumerate(sizes):
    steps = record.steps * SHARE**rung
    results = []
    for name in left[:size]:
      trial = _from_probe(_short(configs[name], steps), folder / FOLDER)
      result = _run(trial, folder / FOLDER / f"{steps}_{name}", name)
      results.append({"name": name, **result})
      trials.append(Trial(name, steps, result["scores"].get(TOP1)))
      _write(folder, dataclasses.replace(record, trials=tuple(trials)))
    left = _ranked(results)
  chosen = left[0]
  _write(folder, Trials(record.steps, tuple(trials), chosen))
  _print(f"chosen      {chosen}")
  return configs[chosen]


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
  config: Config, folder: epath.Path, budget: str, num_trials: int
) -> int:
  """Returns the steps of all trials together that the time allows.

  A trial of `FEWEST_STEPS` is timed for it.
  """
  began = time.monotonic()
  timed = _from_probe(_short(config, FEWEST_STEPS), folder)
  _run(timed, folder / TIMED, TIMED)
  total = time.monotonic() - began
  rates = [
    row["train/images_per_second"]
    for row in read_metrics(str(folder / TIMED))
    if "train/images_per_second" in row
  ]
  step = config.data.batch_size / rates[-1]
  start = max(0.0, total - FEWEST_STEPS * step)  # of a trial
  seconds = float(budget[:-1]) * (60 if budget.endswith("m") else 1)
  return max(0, int((seconds - num_trials * start) / step))


def _in_words(budget: str) -> str:
  units = {"m": "minutes", "s": "seconds"}
  unit = units.get(budget[-1], "steps")
  return f"{budget.rstrip('ms')} {unit}"


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
  if config.init_head != "linear_probe":
    return config
  probe = folder / PROBE / linear_probe.FOLDER
  return dataclasses.replace(config, init=str(probe), init_head="zeros")


def _run(config: Config, folder: epath.Path, name: str) -> dict[str, Any]:
  """Trains a trial unless it has its result; see `sweep.run`."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / LOG).open("a") as log, contextlib.redirect_stdout(log):
    with contextlib.redirect_stderr(log):
      result = run(config, folder, keeps_weights=False)
  top1 = result["scores"].get(TOP1)
  text = "diverged" if top1 is None else f"{TOP1} {top1:.2%}"
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


def _write(folder: epath.Path, record: Trials) -> None:
  if jax.process_index() == 0:
    run_info.write_json(str(folder), TRIALS, dataclasses.asdict(record))


def _print(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)

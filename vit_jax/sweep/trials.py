"""Short trials before a run: what suits the data is chosen on held-out images.

A config file asks for them by a function `get_trials(argument)` beside its
`get_config`. The trials go round by round: each choice of a round is tried with
the best choices of the rounds before it. All trials begin with the same
weights, take the same number of steps, and are scored by the evaluator `val`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

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
from vit_jax.sweep.points import chosen
from vit_jax.sweep.sweep import run
from vit_jax.writers import run_info
from vit_jax.writers.metric_writer import read_metrics

FOLDER, FILE = "trials", "trials.json"  # in the workdir
SPEED = "speed"  # a trial that is timed; its linear probe starts the others
LOG = "log.txt"  # in the folder of a trial: what it prints
FEWEST_STEPS, MOST_STEPS = 20, 1000  # of a trial

Options = Mapping[str, Any]  # option without "config." -> value


class Trials(NamedTuple):
  """What is tried.

  Attributes:
    rounds: Round -> choice -> the options that it sets.
    seconds: Time for all trials together; 0: none is made.
  """

  rounds: Mapping[str, Mapping[str, Options]]
  seconds: float


@dataclasses.dataclass(frozen=True)
class Record:
  """Contents of `FILE`.

  steps: Steps of each trial, which stay the same when the run resumes.
  trials: Those made: "round", "choice", and "scores" by name.
  chosen: Round -> its best choice.
  """

  steps: int
  trials: tuple[dict[str, Any], ...] = ()
  chosen: dict[str, str] = dataclasses.field(default_factory=dict)


def choose(
  config: Config, trials: Trials, fixed: Collection[str], workdir: str
) -> Config:
  """Returns the config with the best choice of every round.

  The same call after an interruption goes on with the trial that is missing.

  Args:
    config: The run.
    trials: What is tried.
    fixed: Options that the user has set, which are not tried.
    workdir: Folder of the run.

  Raises:
    ConfigError: A trial cannot work.
  """
  folder = epath.Path(workdir)
  rounds = _free(trials.rounds, fixed)
  num_trials = sum(map(len, rounds.values())) - max(0, len(rounds) - 1)
  if not (rounds and trials.seconds):
    return config
  if (folder / FILE).exists():
    record = json_file.read_as(Record, folder / FILE)
  else:
    _print(_plan(rounds, num_trials, trials.seconds))
    seconds = trials.seconds / num_trials
    record = Record(_affordable_steps(config, folder / FOLDER, seconds))
    _write(folder, record)
  if record.steps < FEWEST_STEPS:
    _print(f"trials      none: a budget of {trials.seconds:g} s is too short")
    return config
  probe = str(folder / FOLDER / SPEED / linear_probe.FOLDER)
  rows, best, results = [], config, {}
  for round_name, choices in rounds.items():
    begin = len(rows)
    for choice, options in choices.items():
      candidate = _with(best, options)
      if candidate not in results:
        name = f"{round_name}={choice}"
        trial = dataclasses.replace(
          _short(candidate, record.steps), init=probe, init_head="zeros"
        )
        results[candidate] = _trial(trial, folder / FOLDER / name, name)
      result = results[candidate]
      rows.append({"round": round_name, "choice": choice, "name": choice})
      rows[-1] |= result
    winner = chosen(rows[begin:]) or next(iter(choices))
    best = _with(best, choices[winner])
    record = dataclasses.replace(
      record,
      trials=tuple(
        {k: row[k] for k in ("round", "choice", "scores", "error")}
        for row in rows
      ),
      chosen=record.chosen | {round_name: winner},
    )
    _write(folder, record)
  text = ", ".join(f"{name} {value}" for name, value in record.chosen.items())
  _print(f"chosen      {text}")
  return best


def _free(
  rounds: Mapping[str, Mapping[str, Options]], fixed: Collection[str]
) -> dict[str, dict[str, Options]]:
  """Returns the rounds in which something is left to choose."""
  free = {
    name: {k: o for k, o in choices.items() if not {*o} & {*fixed}}
    for name, choices in rounds.items()
  }
  return {name: choices for name, choices in free.items() if len(choices) > 1}


def _plan(
  rounds: Mapping[str, Mapping[str, Options]], num_trials: int, seconds: float
) -> str:
  """Returns the lines that say what will be tried."""
  lines = [
    f"trials      {num_trials} in about {seconds / 60:g} minutes, each scored"
    f" on the held-out images; what is set on the command line is not tried"
  ]
  lines += [f"            {k}: {', '.join(c)}" for k, c in rounds.items()]
  return "\n".join(lines)


def _affordable_steps(
  config: Config, folder: epath.Path, seconds: float
) -> int:
  """Returns how many steps a trial has time for, by the clock.

  A run of `FEWEST_STEPS` is timed: its start, and its steps after the first.

  Args:
    config: The run.
    folder: Folder of the trials.
    seconds: Time of one trial.
  """
  _trial(_short(config, FEWEST_STEPS), folder / SPEED, SPEED)
  began = time.monotonic()
  again = dataclasses.replace(
    _short(config, FEWEST_STEPS),
    init=str(folder / SPEED / linear_probe.FOLDER),
    init_head="zeros",
  )
  _trial(again, folder / "again", "again")
  total = time.monotonic() - began
  rates = [
    row["train/images_per_second"]
    for row in read_metrics(str(folder / "again"))
    if "train/images_per_second" in row
  ]
  step = config.data.batch_size / rates[-1]
  most = (seconds - (total - FEWEST_STEPS * step)) / step
  return max(0, min(int(most), MOST_STEPS))


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


def _trial(config: Config, folder: epath.Path, name: str) -> dict[str, Any]:
  """Trains a trial unless it has its result; see `sweep.run`."""
  log = folder / LOG
  log.parent.mkdir(parents=True, exist_ok=True)
  with log.open("a") as f, contextlib.redirect_stdout(f):
    with contextlib.redirect_stderr(f):
      result = run(config, folder, keeps_weights=False)
  top1 = result["scores"].get(f"{HELD_OUT}/top1")
  text = "diverged" if top1 is None else f"{HELD_OUT} {top1:.2%}"
  _print(f"trial       {name}, {config.total_steps:,} steps: {text}")
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

"""Short trials before a run, which choose options on held-out images.

A config file has a function `get_trials(argument)`, which returns `(rounds_of,
budget)`. `rounds_of(config)` returns the rounds for the config of the command;
it is None if there are no trials. A round has changes of one kind, such as
augmentations or learning rates. Each change is tried on the best config so far.
If the best change of the round has a lower loss on the held-out images, the
next rounds keep it. (For some hundred images the loss is compared, because
differences in accuracy are mostly chance.) All trials have the same length, at
most the length of the run: the best augmentation after few steps is often too
weak for the whole run. (A change may also set the length of the run.) Each
trial begins with the same linear probe; `val` scores it at the end.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import experiment, run_checks, run_summary, weights
from vit_jax.callbacks.progress import format_seconds
from vit_jax.checkpointing import resume_rules
from vit_jax.config import HELD_OUT, Config, ConfigError, build, cli, to_dict
from vit_jax.data import sources
from vit_jax.distributed import agreement
from vit_jax.finetune import linear_probe, one_run, trial_candidates
from vit_jax.finetune.one_run import RESULT, print_once, read_by_first
from vit_jax.finetune.results import LINEAR_PROBE, TRIALS, Trial, Trials
from vit_jax.finetune.trial_candidates import Round
from vit_jax.options import unexpected
from vit_jax.writers import run_info
from vit_jax.writers.metric_writer import read_metrics

FOLDER = "trials"  # folder in the workdir
BEGUN = "begun.json"  # in this folder: what the trials began with
LOG = "log.txt"  # output of a trial, in its folder
# Runs before the trials: the probe that all start from, and one that is timed.
PROBE, TIMED = "probe", "timed"
TOP1, LOSS = f"{HELD_OUT}/top1", f"{HELD_OUT}/loss"
FEWEST_STEPS = 20  # least number of steps of a trial
# The first trial, if the command line sets all that the first round compares.
AS_GIVEN = "no change"

Options = Mapping[str, Any]  # option without "config." -> value


def rounds_of(config: Config, has_size: bool) -> list[Round]:
  """Returns the rounds of trials for the data and the weights of a config.

  Args:
    config: The run; it has `init`.
    has_size: Whether the user has set the image size; then it is not changed.
  """
  data = config.data
  source = sources.open_source(
    data.dataset, data.split, data.data_dir, fake=config.fake_data
  )
  params = weights.read(config.init).params
  return trial_candidates.rounds(
    sources.typical_side(source),
    source.num_examples,
    params,
    config.model,
    has_size,
  )


def choose(
  config: Config,
  rounds_of: Callable[[Config], Sequence[Round]],
  budget: str,
  workdir: str,
  fixed: Collection[str] = (),
  run: one_run.Run = one_run.run,
) -> Config:
  """Returns the config with the changes that the trials chose. Collective.

  After an interruption the same call continues with the first missing trial.
  The length of a trial is that of the first call. A call with other options,
  data or budget is an error until the run itself has a checkpoint; from then on
  the run compares them. A run with a checkpoint and no trials gets none.

  Args:
    config: The run.
    rounds_of: Function from the config to the rounds of changes.
    budget: Steps of all trials together, "2000"; or their time, "10m" or "90s",
      from which the steps are computed once, by the clock. The steps are
      logged, so that another run can have the same trials.
    workdir: Folder of the run.
    fixed: Options that no trial may set.
    run: Function that trains a trial.

  Raises:
    ConfigError: The run cannot work; a change sets an option that does not
      exist, or cannot work; or unfinished trials began with something else.
  """
  folder = epath.Path(workdir)
  # The workdir is not compared yet: it may have a run with the options that the
  # trials chose.
  run_checks.setup(config)
  rounds = rounds_of(config)
  changes = [_changes(config, r, fixed) for r in rounds]
  num_trials = sum(map(len, changes))
  for options in (o for of_round in changes for o in of_round.values()):
    run_checks.setup(_with(config, options))
  if not num_trials:
    print_once(
      "trials      none: the command sets every option that they compare"
    )
    return config
  if not changes[0]:  # the others are compared with what the command sets
    changes[0] = {AS_GIVEN: {}}
    rounds = [lambda _: {AS_GIVEN: {}}, *rounds[1:]]
    num_trials += 1
  whole = experiment.Experiment(config, workdir)
  longest = whole.run_shape.total_steps
  if longest < FEWEST_STEPS:
    print_once(f"trials      none: the run itself has {longest} steps")
    return config
  names = [name for of_round in changes for name in of_round]
  known = read_by_first(folder / TRIALS)
  if whole.start and not known:
    print_once(f"trials      none: the run in {workdir} began without any")
    return config
  if not whole.start:
    _check_begun(_beginning(whole, budget, names), config, folder)
  # Large images are shrunk now, so that no trial's time includes it. The data
  # set may also be generated; its identity is known only then.
  lines = run_summary.data_lines(whole)
  if whole.data_note:
    lines.append(f"note        {whole.data_note}")
  print_once("\n".join(lines))
  beginning = _beginning(whole, budget, names)
  del whole  # frees the records that it has read
  is_timed = False  # then the probe is fitted
  if known:
    record = Trials(known["steps"])
    print_once(
      f"trials      {num_trials} short runs of {record.steps:,} steps, begun"
      " before"
    )
  else:
    print_once(
      f"trials      {num_trials} short runs within {_budget_text(budget)},"
      f" scored on held-out images: {', '.join(names)}"
    )
    if budget.isdecimal():
      total = int(budget)
    else:
      total = (read_by_first(folder / FOLDER / BEGUN) or {}).get("steps")
      if total is None:
        _write(folder / FOLDER, BEGUN, beginning)
        is_timed = True
        total = _affordable_steps(
          config, folder / FOLDER, budget, num_trials, run
        )
      beginning["steps"] = total  # another measurement would differ
      _write(folder / FOLDER, BEGUN, beginning)
    if total < FEWEST_STEPS * num_trials:
      print_once(
        f"trials      none: {num_trials} trials need at least"
        f" {FEWEST_STEPS * num_trials:,} steps; budget={budget} allows"
        f" {total:,}{' at the measured speed' * (not budget.isdecimal())}."
        " A larger budget, in minutes (30m) or steps"
        f" ({FEWEST_STEPS * num_trials}), allows them."
      )
      return config
    record = Trials(min(longest, total // num_trials))
    print_once(
      f"trials      {record.steps:,} steps each; budget={total} repeats these"
      " trials on any machine"
    )
    _write(folder / FOLDER, BEGUN, beginning)
    _write(folder, TRIALS, dataclasses.asdict(record))
  if not is_timed:
    _make_probe(config, folder / FOLDER, run)

  seconds: list[float] = []  # of the trials that ran now
  trials: list[Trial] = []
  best: dict[str, Any] | None = None  # name and result
  chosen: list[str] = []
  for i, round_ in enumerate(rounds):
    results = [best] if best else []
    of_round = _changes(config, round_, fixed)
    for name, options in of_round.items():
      short = _from_probe(
        _short(_with(config, options), record.steps), folder / FOLDER
      )
      text = ", ".join([*chosen, name])
      place, start = folder / FOLDER / f"{i}_{name}", time.monotonic()
      is_new = not (place / RESULT).exists()
      result = _run(short, place, run)
      seconds += [time.monotonic() - start] * is_new
      top1, loss = _scores(result)
      score = "diverged"
      if loss is not None:
        score = f"loss {loss:.4f}, top-1 {top1:.2%}"
      results.append({"name": name, **result})
      trials.append(Trial(text, record.steps, top1, loss))
      # A later round may have more trials than it had before its choice.
      left = max(0, num_trials - len(trials))
      count = f"{len(trials)}/{len(trials) + left}"
      eta = ""
      if left and seconds:
        eta = f"  ETA {format_seconds(left * sum(seconds) / len(seconds))}"
      print_once(f"{f'trial {count}':<12}{score}: {text}{eta}")
      record = dataclasses.replace(record, trials=tuple(trials))
      _write(folder, TRIALS, dataclasses.asdict(record))
    finite = [r for r in results if _scores(r)[1] is not None]
    best = min(finite, key=lambda r: _scores(r)[1], default=None)
    if best and best["name"] in of_round:
      config = _with(config, of_round[best["name"]])
      chosen.append(best["name"])
  text = ", ".join(chosen) or AS_GIVEN  # if all diverged
  record = Trials(record.steps, tuple(trials), text)
  _write(folder, TRIALS, dataclasses.asdict(record))
  print_once(f"chosen      {text}")
  return config


def check_without(
  config: Config, workdir: str, allow_change: Collection[str]
) -> None:
  """Checks a command without trials if trials chose the run's options.

  Collective.

  Args:
    config: The run of the command.
    workdir: Folder of the run.
    allow_change: See `experiment.Experiment`.

  Raises:
    ConfigError: The run has other options; the message has the budget.
  """
  folder = epath.Path(workdir)
  known = read_by_first(folder / TRIALS) or {}
  resumed = experiment.Experiment(config, workdir).resumed
  if not resumed or known.get("chosen") in (None, AS_GIVEN):
    return
  if resume_rules.errors(resumed.changes, allow_change, workdir):
    begun = read_by_first(folder / FOLDER / BEGUN) or {"budget": "5m"}
    expected = f"budget={begun['budget']}, as trials chose options in {workdir}"
    raise ConfigError([unexpected("--config", "budget=0", expected)])


def _beginning(
  whole: experiment.Experiment, budget: str, names: Sequence[str]
) -> dict[str, Any]:
  """Returns what decides the results of trials, for `BEGUN`."""
  data = {"config.data.dataset": whole.data_info}
  for e in whole.evals:
    if e.name == HELD_OUT:
      key = f"config.evals.{HELD_OUT}.split"
      data[key] = whole.sources.inspect(e.dataset, e.split)
  return {
    "config": to_dict(whole.config),
    "budget": budget,
    "trials": ", ".join(names),
    "data": {key: agreement.of_data(source) for key, source in data.items()},
  }


def _check_begun(
  now: Mapping[str, Any], config: Config, folder: epath.Path
) -> None:
  """Raises `ConfigError` if trials in a workdir began with something else."""
  was = read_by_first(folder / FOLDER / BEGUN)
  if was is None:
    return
  held_out = f"evals.{HELD_OUT}."
  errors = [
    c.text
    for c in resume_rules.differences(was["config"], config)
    if c.rule.makes_another_run
    or (c.key.startswith(held_out) and c.key != f"{held_out}every_steps")
  ]
  if not any(e.startswith("config.data.dataset") for e in errors):
    errors += [
      f"{key}: the records were {text}, are now {now['data'].get(key)}"
      for key, text in was["data"].items()
      if now["data"].get(key) != text
    ]
  if not errors and was["trials"] != now["trials"]:
    errors.append(f"trials were {was['trials']}, are now {now['trials']}")
  if was["budget"] != now["budget"]:
    errors.append(f"budget was {was['budget']}, is now {now['budget']}")
  if errors:
    errors[-1] += (
      f"; run the old command to continue the trials in {folder / FOLDER}, or"
      " take another --workdir."
    )
    raise ConfigError(errors)


def _changes(
  config: Config, round_: Round, fixed: Collection[str]
) -> dict[str, Options]:
  """Returns the changes of a round, except those that set a `fixed` option."""
  changes = round_(config)
  return {k: o for k, o in changes.items() if not {*o} & {*fixed}}


def _make_probe(config: Config, folder: epath.Path, run: one_run.Run) -> None:
  """Fits the linear probe with which all trials begin, and prints its score."""
  if config.init_head != "linear_probe":
    return
  _run(_short(config, 1), folder / PROBE, run)
  outcome = read_by_first(folder / PROBE / LINEAR_PROBE)
  if outcome:
    print_once(
      f"probe       {outcome['top1']:.2%} of the held-out images right; every"
      " trial begins with this head"
    )


def _affordable_steps(
  config: Config,
  folder: epath.Path,
  budget: str,
  num_trials: int,
  run: one_run.Run,
) -> int:
  """Returns the number of steps of all trials that fit into the time.

  A trial of `FEWEST_STEPS` is timed by the clock of process 0.
  """
  _make_probe(config, folder, run)
  began = time.monotonic()
  timed = _from_probe(_short(config, FEWEST_STEPS), folder)
  _run(timed, folder / TIMED, run)
  total = time.monotonic() - began
  text = ""
  if jax.process_index() == 0:
    rates = [
      row["train/images_per_second"]
      for row in read_metrics(str(folder / TIMED))
      if "train/images_per_second" in row
    ]
    # A diverged trial has no rate.
    step = config.data.batch_size / rates[-1] if rates else total / FEWEST_STEPS
    start = max(0.0, total - FEWEST_STEPS * step)  # of a trial
    seconds = float(budget[:-1]) * (60 if budget.endswith("m") else 1)
    text = str(max(0, int((seconds - num_trials * start) / step)))
  return int(agreement.broadcast_text(text))


def _budget_text(budget: str) -> str:
  units = {"m": "minutes", "s": "seconds"}
  unit = units.get(budget[-1], "steps")
  return f"{budget.rstrip('ms')} {unit}"


def _short(config: Config, steps: int) -> Config:
  """Returns a run of a few steps, scored once on held-out images."""
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
  """Returns a trial that begins with the linear probe of the first trial."""
  if config.init_head != "linear_probe":
    return config
  probe = folder / PROBE / linear_probe.FOLDER
  # The patch embedding of the probe has the normalisation of `init_mean`.
  return dataclasses.replace(
    config, init=str(probe), init_head="zeros", init_mean=None
  )


def _run(
  config: Config, folder: epath.Path, run: one_run.Run
) -> dict[str, Any]:
  """Trains a trial, unless it is finished; see `one_run.run`."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / LOG).open("a") as log, contextlib.redirect_stdout(log):
    with contextlib.redirect_stderr(log):
      return run(config, folder, False)


def _scores(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
  """Returns top-1 and loss of the held-out images; None if it diverged."""
  scores = result["scores"]
  return scores.get(TOP1), scores.get(LOSS)


def _with(config: Config, options: Options) -> Config:
  """Returns the config with some options set.

  Raises:
    ConfigError: An option does not exist, or a value has a wrong type.
  """
  values = to_dict(config)
  for key, value in options.items():
    cli.override(values, key, value)
  built, errors = build(values)
  if errors:
    raise ConfigError([f"get_trials: {error}" for error in errors])
  return built


def _write(folder: epath.Path, file: str, values: Mapping[str, Any]) -> None:
  if jax.process_index() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    run_info.write_json(str(folder), file, values)

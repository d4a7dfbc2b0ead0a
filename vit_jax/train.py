"""Trains a Vision Transformer: `vit-jax train --config=FILE`.

`train_and_evaluate` is the whole run, in the order in which things come to
exist: mesh, data, model, state, step, evaluators, loop. The same command again
resumes from the last checkpoint, and ends in the bits of an unbroken run.
"""

from vit_jax.callbacks import preemption, startup
from vit_jax.config import cli

if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  ARGS = cli.parse(
    "train",
    cli.TRAIN_FLAGS,
    several=("allow_change",),
    description="Pre-trains or fine-tunes a model, as a config says. The same"
    " command again goes on from the last checkpoint.",
    example="vit-jax train --config=vit_b16:imagenet2012 --workdir=runs/b16\n"
    "vit-jax train --config=glyphs --workdir=/tmp/try --fake_data",
  )
  SIGNALS = preemption.Signals()

# ruff: noqa: E402
import contextlib
from collections.abc import Callable

import jax

from vit_jax import experiment, malloc, sharding, train_batches, weights
from vit_jax import step as step_lib
from vit_jax.batch import Data
from vit_jax.callbacks import (
  nonfinite,
  predictions,
  replay,
  run_lock,
)
from vit_jax.callbacks.accounting import account_of
from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.preemption import Notices, Signals
from vit_jax.callbacks.progress import Progress
from vit_jax.callbacks.throughput import meter_of, updates
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.checkpointing import convert_state, resume_rules
from vit_jax.config import Config, to_dict
from vit_jax.distributed.supervision import supervised
from vit_jax.writers import run_info
from vit_jax.writers.metric_writer import Writer
from vit_jax.writers.rows import Rows


def train_and_evaluate(
  config: Config,
  workdir: str,
  data: Data | None = None,
  *,
  began: float | None = None,
  allow_change: tuple[str, ...] = (),
  stop: Notices | None = None,
) -> step_lib.TrainState:
  """Trains to the end of the run, from its newest checkpoint if it has one.

  Args:
    config: The run.
    workdir: Folder for checkpoints, metrics, TensorBoard and predictions.
    data: Training data; None: those of config.data. With data of your own,
      config.data.dataset is used only by evaluators that name no other, and
      need not exist; batch_size, and the image size of ops, must be those of
      `data`.
    began: Start of the command, as `startup.BEGAN`; None: now.
    allow_change: Options and sections, such as "optim.lr" and "data", that may
      differ from those with which the run began.
    stop: Is asked at every step whether to stop; None: nothing stops the run.

  Returns:
    The last state.

  Raises:
    ConfigError: Something about the run cannot work; nothing was compiled.
    DataError: Records cannot be trained on, or scored.
    DeviceFault: A step computed twice had two results.
    FloatingPointError: The loss or the gradients are no longer finite.
    SaveError: The last checkpoint could not be written.
    Stop: `stop` had a notice; the state is saved.
    WriteError: The workdir cannot be written, was deleted, or was taken.
  """
  stop = stop or Notices(Phases(began))
  with contextlib.ExitStack() as at_exit:  # also after an error, or Ctrl-C
    opening = at_exit.enter_context(startup.Start(began, stop.phases.beat))
    held = run_lock.Lock(workdir, phases=stop.phases)
    prepared = experiment.check(
      config, workdir, data=data, allowed=allow_change
    )
    at_exit.enter_context(held)
    opening.ends("checks")
    return _train(prepared, opening, stop, held, at_exit)


def _train(
  prepared: experiment.Run,
  opening: startup.Start,
  stop: Notices,
  held: run_lock.Lock,
  at_exit: contextlib.ExitStack,
) -> step_lib.TrainState:
  """The run itself; whatever it registers at `at_exit` is always closed."""
  config, workdir, data = prepared.config, prepared.workdir, prepared.data
  facts, phases = prepared.facts, stop.phases
  mesh = sharding.make_mesh(config.mesh)
  opening.ends("data")
  total_steps = facts.total_steps
  assembly = step_lib.assemble(config, facts, mesh)
  checkpointer = checkpointer_lib.Checkpointer(workdir, config.checkpoint)
  at_exit.callback(checkpointer.close)
  at_exit.callback(phases.enter, "save")
  form = convert_state.form_of(config, facts, assembly, mesh)
  start, state = checkpointer.restore_newest(
    prepared.start, assembly.state, form
  )
  prepared.start = start  # an older one where arrays are damaged
  metadata = run_info.metadata(prepared, assembly.state.params)
  progress = Progress(total_steps, start, is_shown=jax.process_index() == 0)
  at_exit.callback(progress.close)
  progress.note(run_info.text(prepared, mesh, assembly.state.params))

  if start:
    progress.note(f"resumes     step {start:,} of {workdir}")
    progress.note(prepared.resumed.take())
  else:
    state = assembly.fresh_state()
    if config.init:
      params, report = prepared.take_weights()
      state = weights.with_weights(state, params)
      del params  # the host's copy
      progress.note(weights.format_report(report))
  run_info.write_json(workdir, "config.json", to_dict(config))
  run_info.write_json(workdir, "metadata.json", metadata)
  opening.ends("model and state")

  newest = checkpointer.newest
  guard = nonfinite.Guard(prepared, newest, progress.note, held.check)
  at_exit.callback(guard.close)
  batches = guard.remembered(train_batches.batches(prepared, start))
  evaluators = prepared.evaluators(
    assembly.predict, mesh, assembly.fresh_params, beat=stop.beat
  )
  for evaluator in evaluators:
    if evaluator.config.dataset != config.data.dataset:
      progress.note(f"{evaluator.config.name:<11} {evaluator.note}")
  writer = Writer(workdir, start, config, progress.note, held.check)
  at_exit.enter_context(writer)
  meter = meter_of(config, facts, mesh)
  at_exit.callback(meter.close)
  account = account_of(prepared, mesh.size, phases, held)

  was = prepared.resumed_metadata
  rows = Rows(writer, prepared.evals, start, progress.note, was)
  at_exit.callback(rows.close)
  if start:  # the run may have stopped between checkpoint and evaluation
    due = [e for e in evaluators if prepared.is_due(e.config, start)]
    with phases("evaluation"):
      for evaluator in rows.owed(due):
        rows.score(start, evaluator, state.eval_params)
  opening.ends("evaluators")

  def save(step: int, write: Callable[..., None]) -> None:
    nonlocal metadata  # a new dict: that before may be on its way to the disk
    kept = account.metadata(step) | {nonfinite.KEY: guard.counts()}
    metadata = {**metadata, **kept, **rows.metadata(step)}
    held.check()  # not into the folder of another run
    guard.due()  # the files have all rows up to the checkpoint
    writer.due()
    with phases("save"):
      write(step, state, metadata)
      run_info.write_json(workdir, "metadata.json", metadata, progress.note)

  @at_exit.push
  def save_if_stopped(_, stopped, *__) -> None:
    if stop.ends(stopped) and step:
      stopped.step = step
      if step > start:
        guard.check(step, {})
        save(step, checkpointer.save_now)
      rows.write(wait=True, before=step)  # its own are made up for

  # The order is fixed: batch, step, log, checkpoint, evaluate. `step` counts
  # batches already taken, so a checkpoint of step n resumes with batch n.
  steps = range(start + 1, total_steps + 1)
  train_step = replay.checked(
    assembly.train_step, assembly.state, mesh, start, config.checks.replay
  )
  batches = train_batches.on_devices(batches, mesh, opening)
  trained = updates(train_step, state, batches, steps, meter, phases)
  phases.enter("step")
  step = start
  for step, state, metrics, _ in trained:
    guard.add(step, metrics.pop("fingerprint"))
    saves = prepared.is_due(config.checkpoint, step)
    # The rows are those of an uninterrupted run; the screen shows one more.
    has_row = (
      saves or step == 1 or experiment.is_multiple(step, config.log_steps)
    )
    saves |= checkpointer.retry_due(step)
    if has_row or saves or step == start + 1:
      values = {k: float(v) for k, v in jax.device_get(metrics).items()}
      values = guard.check(step, values)  # before a save
      values["lr"] = float(assembly.schedule(step - 1 - guard.skipped))
      values["epoch"] = account.at(step)["images_seen"] / data.num_examples
      values |= meter.rates(step)
      if has_row:
        row = {f"train/{k}": v for k, v in values.items()}
        rows.put(step, row | account.metrics(step))
      progress.update(step, values)
      progress.note(opening.text("first step"))
      progress.note(meter.advice(values))
    else:
      progress.update(step)

    due = [e for e in evaluators if prepared.is_due(e.config, step)]
    with meter.paused():
      # A run that resumes from here has the rows up to it, but after a notice.
      with phases("evaluation"):
        rows.write(wait=saves or bool(due), until=stop.has_come)
      if saves:
        save(step, checkpointer.save)
      with phases("evaluation"):
        for evaluator in due:
          rows.score(step, evaluator, state.eval_params)
    stop.check()
  with phases("evaluation"):
    rows.write(wait=True, until=stop.has_come)
  phases.enter("save")  # to the end
  checkpointer.save_now(total_steps, state, metadata)
  stop.check_last()

  if start == total_steps:
    progress.note(f"complete    all {total_steps:,} steps were done before")
  metadata = metadata | account.metadata(total_steps)  # with all evaluations
  run_info.write_json(workdir, "metadata.json", metadata, progress.note)
  progress.note(account.text(total_steps))
  predictions.save(evaluators, state.eval_params, workdir)
  return state


def main(args: cli.Args, signals: Signals | None = None) -> None:
  """Joins the other processes, checks the run, trains."""
  workdir = args.flags["workdir"] or f"runs/{args.config_name}"
  with supervised(args, workdir, signals) as stop:
    startup.use_cache(workdir)
    malloc.keep()
    allowed = resume_rules.names_of(args.flags["allow_change"])
    if args.faults:
      experiment.check(args.config, workdir, args.faults, allowed=allowed)
    train_and_evaluate(
      args.config,
      workdir,
      began=startup.BEGAN,
      allow_change=allowed,
      stop=stop,
    )


if __name__ == "__main__":
  main(ARGS, SIGNALS)

"""Trains a Vision Transformer: `vit-jax train --config=FILE`.

`train_and_evaluate` is the whole run, in the order in which things come to
exist: setup, state, data, loop. What happens around a step is in
`vit_jax/callbacks/`. The same command again resumes from the newest checkpoint,
and ends in the same bits as an uninterrupted run on the same devices.
"""

import sys

if __name__ == "__main__":  # before the imports, which --help needs none of
  from vit_jax.__main__ import main

  main(["train", *sys.argv[1:]])

import contextlib
from collections.abc import Iterable, Sequence

import jax

from vit_jax import experiment as experiment_lib
from vit_jax import run_checks, run_summary, sharding
from vit_jax.batch import Data, DataError
from vit_jax.callbacks import Callback, CallbackList, Stop
from vit_jax.callbacks.defaults import default_callbacks
from vit_jax.callbacks.named import from_names
from vit_jax.callbacks.progress import note, note_if_slow
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.callbacks.startup import Startup
from vit_jax.checkpointing import resume_rules
from vit_jax.checkpointing.checkpointer import Checkpointer, SaveError
from vit_jax.config import Config, ConfigError
from vit_jax.data.records import Given
from vit_jax.data.sources import Sources
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.inputs import Inputs
from vit_jax.step import Trainer, TrainState
from vit_jax.writers import MetricWriter, run_info
from vit_jax.writers.atomic_files import WriteError
from vit_jax.writers.metric_writer import MetricLog

# Errors whose message is all that a user needs.
EXPECTED_ERRORS = (
  ConfigError,
  DataError,
  FloatingPointError,
  SaveError,
  WriteError,
)


def train_and_evaluate(
  config: Config,
  workdir: str,
  data: Data | None = None,
  *,
  sources: Given | None = None,
  callbacks: Sequence[Callback] = (),
  allow_change: Sequence[str] = (),
  writer: MetricWriter | None = None,
  began: float | None = None,
) -> TrainState:
  """Trains to the last step, from the newest checkpoint if there is one.

  Args:
    config: The run.
    workdir: Folder for checkpoints, metrics, TensorBoard and predictions.
    data: Training data; None to open config.data. With your own data,
      batch_size and the image size of ops must match `data`.
      config.data.dataset is then used only by evaluators that name no data set,
      and need not exist.
    sources: Data sets that are objects of your program, by the name that
      config.data.dataset, or that of an evaluator, gives them, such as {"mine":
      {"train": ..., "test": ...}}; see `vit_jax.data.records.Records`.
    callbacks: Called around the steps, after the default ones.
    allow_change: Options and sections, such as "optim.lr" and "data", that may
      differ from those with which the run began.
    writer: Also gets every row of metrics.jsonl, in process 0, and is closed at
      the end; for example, one of clu's metric_writers.
    began: When the process started, in seconds since the epoch; None for now.
      The run's time counts from here.

  Returns:
    The last state.

  Raises:
    ConfigError: The run cannot work; nothing was compiled.
    DataError: Records cannot be used for training or evaluation.
    FloatingPointError: The loss or the gradients are no longer finite.
    SaveError: The last checkpoint could not be written.
    Stop: A callback stopped the run; the state is saved.
    WriteError: The workdir cannot be written, was deleted, or is used by
      another run.
  """
  # Setup: every error of config, data, weights and disk is raised here.
  startup = Startup(began)
  lock = RunLock(workdir, began=startup.began)  # one run at a time in a folder
  errors: list[str] = []
  # The callbacks of every run are added below.
  hooks = CallbackList([*callbacks, *from_names(config.callbacks, errors)])
  experiment = run_checks.setup(
    config,
    workdir,
    data,
    sources=Sources.of(config, sources),
    allow_change=allow_change,
    # Shrinking a large folder takes hours; each image resets the watchdog.
    on_shrunk=lambda: hooks.enter("start"),
    errors=errors,
  )
  startup.ends("checks")
  total_steps = experiment.run_shape.total_steps
  mesh = sharding.make_mesh(config.mesh)
  trainer = experiment.trainer(mesh, hooks.observers)  # no arrays yet
  checkpointer = Checkpointer(workdir, config.checkpoint, total_steps)
  inputs = Inputs(experiment, trainer, mesh, hooks.on_eval_batch)
  evaluators = experiment.evaluators(
    trainer, mesh, hooks.on_eval_batch, inputs.cached_part
  )
  hooks.put_first(
    default_callbacks(
      experiment, trainer, mesh, evaluators, checkpointer, lock, startup
    )
  )

  with contextlib.ExitStack() as stack:
    stack.enter_context(evaluators)
    stack.enter_context(hooks)
    lock.acquire()  # from here on, this run writes into the folder
    stack.callback(checkpointer.close)
    compiling = None  # in a thread, while the state is made
    if experiment.start < total_steps:
      compiling = trainer.compile_step(inputs.abstract_batch())

    # State:
    # 1. the newest whole checkpoint of the workdir;
    # 2. without one, random parameters, or the weights of config.init;
    # 3. parameters that no checkpoint has, such as the base of adapters;
    # 4. in a new run, what callbacks change, such as the head.
    start, state, saved = checkpointer.restore_newest(
      experiment.start, trainer.state, experiment.form_of(trainer)
    )
    note(run_summary.text(experiment, mesh, trainer.state))
    note(f"resumes     step {start:,} of {workdir}" if start else None)
    state = trainer.completed(state) if start else trainer.init_state()
    note(None if start else experiment.init_report)
    state = experiment.with_weights(state, trainer.state)
    state = state if start else hooks.initial_state(state)
    hooks.on_start(start, state, saved)

    # Data, and the files that describe the run.
    metadata = _metadata(experiment, trainer, start)
    run_info.write_json(workdir, "config.json", metadata["config"])
    batches, text = inputs.batches(start, saved, state)
    note(text)
    note(evaluators.notes(config.data.dataset))
    log = MetricLog(
      workdir,
      start,
      config=config,
      evals=experiment.evals,
      writer=writer,
      note=note,
      check_owner=lock.check,
      has_row=checkpointer.is_periodic,
      until=hooks.stop_requested,
      on_scores=hooks.on_scores,
    )
    stack.enter_context(log)

    def metadata_at(step: int) -> dict:
      return {**metadata, "step": step, **hooks.state_dict(step)}

    run_info.write_json(workdir, "metadata.json", metadata_at(start))

    def save(step: int, is_last: bool = False) -> None:
      if not is_last:  # a checkpoint has all rows before it
        with hooks.phase("evaluation"):
          log.flush()
      what = f"the save of step {step:,} in {workdir}"
      with hooks.phase("save"), note_if_slow(what):
        hooks.before_save(step)  # raises where the state must not be saved
        write = checkpointer.save_now if is_last else checkpointer.save
        write(step, state, metadata_at(step))

    def evaluate(step: int, due: Iterable[Evaluator]) -> None:
      # Evaluators are free to hand numpy arrays to jitted functions.
      with hooks.phase("evaluation"), jax.transfer_guard("allow"):
        log.flush()  # one evaluation at a time
        for evaluator in due:
          gathered = evaluator.gather(state.eval_params)
          log.write_later(step, evaluator.score, gathered)

    # Loop. The order is fixed: batch, step, log, save, evaluate. `step` counts
    # the steps taken, also skipped ones: step n resumes with batch n.
    step = start
    # The run may have stopped after this checkpoint and before its scores.
    missing = log.missing(start, evaluators.due(start))
    hooks.enter("step")
    # Only explicit transfers between host and devices, such as `device_get`.
    stack.enter_context(jax.transfer_guard("disallow"))
    try:
      if missing:
        evaluate(start, missing)
      for step in range(start + 1, total_steps + 1):
        with hooks.phase("input"):
          batch = next(batches)
        with (
          hooks.phase("step" if step > start + 1 else "compile"),
          jax.profiler.StepTraceAnnotation("train", step_num=step),
        ):
          if compiling and step == start + 1:
            compiling.result()  # raises what the compiler does
          state, metrics = trainer.train_step(state, batch)
        hooks.on_step(step, batch, metrics)  # does not wait for the devices
        if step == total_steps:
          state = hooks.final_state(step, state)

        saves, due = checkpointer.due(step), evaluators.due(step)
        if saves or log.due(step):
          values = hooks.on_log(step, jax.device_get(metrics))  # may raise
          log.write_training(step, values)
        if saves:
          save(step)
        if due:
          evaluate(step, due)
        with hooks.phase("evaluation"):
          log.flush(wait=step == total_steps)
        hooks.check_stop(step)  # raises Stop in all processes at the same step
    except Stop as stop:
      if step > start:
        save(step, is_last=True)
      stop.step = step or None
      log.flush(before=step)  # scores of `step` come on resume
      raise

    with hooks.phase("evaluation"):
      log.flush(before=total_steps + 1)  # if all steps had been done before
    save(total_steps, is_last=True)  # not again if the loop has saved it
    # With the last evaluation and save.
    run_info.write_json(workdir, "metadata.json", metadata_at(step), note)
    if start == total_steps:
      note(f"complete    all {total_steps:,} steps were done before")
    hooks.on_end(state)
  return state


def _metadata(
  experiment: experiment_lib.Experiment, trainer: Trainer, start: int
) -> dict:
  """Returns the metadata for checkpoints.

  Prints and records the options that changed on a resume.
  """
  metadata = run_summary.metadata(experiment, trainer.state)
  metadata["changes"] = []  # of options, since the run began
  if start:
    note("\n".join(experiment.resumed.notes()))
    workdir, changes = experiment.workdir, experiment.resumed.changes
    metadata["changes"] = resume_rules.trail(workdir, start, changes)
    resume_rules.write(workdir, metadata["changes"])
  return metadata

"""Trains a Vision Transformer: `vit-jax train --config=FILE`.

`train_and_evaluate` is the whole run, in the order in which things come to
exist: setup, state, data, loop. What happens around a step is in
`vit_jax/callbacks/`. The same command again resumes from the newest checkpoint,
and ends in the same bits as an uninterrupted run.
"""

import sys

if __name__ == "__main__":  # before the imports, which --help needs none of
  from vit_jax.__main__ import main

  main(["train", *sys.argv[1:]])

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import jax

from vit_jax import activations, linear_probe, run_summary, sharding, weights
from vit_jax import experiment as experiment_lib
from vit_jax import step as step_lib
from vit_jax.batch import Data, DataError
from vit_jax.callbacks import Callback, CallbackList, Stop
from vit_jax.callbacks.defaults import default_callbacks
from vit_jax.callbacks.progress import note, note_if_slow
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.callbacks.startup import Startup
from vit_jax.checkpointing import convert_state, resume_rules
from vit_jax.checkpointing.checkpointer import Checkpointer, SaveError
from vit_jax.config import Config, ConfigError
from vit_jax.data.records import Given
from vit_jax.data.sources import Sources
from vit_jax.evaluators.evaluator import Evaluator
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
) -> step_lib.TrainState:
  """Trains to the last step, from the newest checkpoint if there is one.

  Args:
    config: The run.
    workdir: Folder for checkpoints, metrics, TensorBoard and predictions.
    data: Training data; None for those of config.data. With your own data,
      batch_size and the image size of ops must be those of `data`.
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
  experiment = experiment_lib.setup(
    config,
    workdir,
    data,
    sources=Sources(
      config.data.data_dir, fake=config.fake_data, given=sources or {}
    ),
    allow_change=allow_change,
    # Each shrunk image is progress: hours of it are no hang.
    on_shrunk=lambda: [c.on_phase("start") for c in callbacks],
  )
  startup.ends("checks")
  mesh = sharding.make_mesh(config.mesh)
  run_shape = experiment.counted_shape()
  trainer = step_lib.assemble(  # no arrays yet
    config, run_shape, mesh, [c.step_metrics for c in callbacks]
  )
  total_steps = run_shape.total_steps
  checkpointer = Checkpointer(workdir, config.checkpoint)
  evaluators = experiment.evaluators(
    trainer.predict,
    mesh,
    trainer.init_params,
    on_batch=lambda: hooks.on_eval_batch(),  # the hooks are made below
    frozen_part=trainer.frozen_part,
  )
  hooks = CallbackList(
    default_callbacks(
      experiment, trainer, mesh, evaluators, checkpointer, lock, startup
    )
    + [*callbacks]
  )

  with contextlib.ExitStack() as stack:
    if evaluators:  # one cache, freed without waiting for gc
      stack.callback(evaluators[0].context.shared.clear)
    stack.enter_context(hooks)
    lock.acquire()  # from here on, this run writes into the folder
    stack.callback(checkpointer.close)

    # The step starts from activations of the frozen part of the model if that
    # does not change the result. It compiles in a thread while the state is
    # made.
    part, why_not = activations.usable(experiment, trainer.frozen_part)
    compiling = None
    if experiment.start < total_steps:
      compiling = trainer.compile_step(experiment.abstract_batch(mesh, part))

    # State, and the files that describe the run.
    start, state, saved = _first_state(
      experiment, run_shape, trainer, mesh, checkpointer, evaluators
    )
    hooks.on_start(start, state, saved)
    metadata = _metadata(experiment, trainer, start)
    run_info.write_json(workdir, "config.json", metadata["config"])

    # Data, and the files of metrics.
    computed = None
    if part and start < total_steps:
      computed = activations.compute(
        experiment, part, mesh, state.model_params, hooks.on_eval_batch
      )
    note(computed.note if computed else why_not)
    batches = experiment.train_batches(
      start, saved, mesh, computed and computed.batches
    )
    for evaluator in evaluators:
      if evaluator.config.dataset != config.data.dataset:
        note(f"{evaluator.config.name:<11} {evaluator.note}")
    log = MetricLog(
      workdir,
      start,
      config=config,
      evals=experiment.evals,
      writer=writer,
      note=note,
      check_owner=lock.check,
    )
    stack.enter_context(log)

    def metadata_at(step: int) -> dict:
      return {**metadata, "step": step, **hooks.state_dict(step)}

    run_info.write_json(workdir, "metadata.json", metadata_at(start))

    def save(step: int, wait: bool = False) -> None:
      what = f"the save of step {step:,} in {workdir}"
      with hooks.phase("save"), note_if_slow(what):
        hooks.before_save(step)  # raises where the state must not be saved
        write = checkpointer.save_now if wait else checkpointer.save
        write(step, state, metadata_at(step))

    def evaluate(step: int, due: Iterable[Evaluator]) -> None:
      # Evaluators are free to hand numpy arrays to jitted functions.
      with hooks.phase("evaluation"), jax.transfer_guard("allow"):
        for evaluator in due:
          gathered = evaluator.gather(state.eval_params)
          log.write_later(step, evaluator.score, gathered)

    # Loop. The order is fixed: batch, step, log, save, evaluate. `step` counts
    # the updates applied: a checkpoint of step n resumes with batch n.
    step = start
    # The run may have stopped after this checkpoint and before its evaluation.
    due = experiment.due(evaluators, start)
    missing = log.missing(start, due)
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

        if step == total_steps and config.init_head == "linear_probe":
          with hooks.phase("evaluation"), jax.transfer_guard("allow"):
            state, text = linear_probe.best(workdir, evaluators, state)
            note(f"saved       {text}")

        retries = checkpointer.retry_due(step)
        saves = experiment.is_save_step(step)
        logs = experiment.is_log_step(step)
        due = experiment.due(evaluators, step)
        if logs or retries or step == start + 1:
          values = hooks.on_log(step, jax.device_get(metrics))  # may raise
          if logs:
            log.write(step, {f"train/{k}": v for k, v in values.items()})
        with hooks.phase("evaluation"):
          # A checkpoint has all rows before it, unless the run is to stop.
          log.flush(wait=saves or bool(due), until=hooks.stop_requested)
        if saves or retries:
          save(step)
        evaluate(step, due)
        if step == total_steps:
          with hooks.phase("evaluation"):  # after a signal, scores are missing
            log.flush(until=hooks.stop_requested)
        hooks.check_stop(step)  # raises Stop in all processes at the same step
    except Stop as stop:
      if step > start:
        save(step, wait=True)
      stop.step = step or None
      log.flush(before=step)  # scores of `step` come on resume
      raise

    with hooks.phase("evaluation"):
      log.flush()  # for a run that had done all steps before
    save(total_steps, wait=True)  # not again if the loop has saved it
    whole = metadata_at(total_steps)  # with the last evaluation and save
    run_info.write_json(workdir, "metadata.json", whole, note)
    if start == total_steps:
      note(f"complete    all {total_steps:,} steps were done before")
    hooks.on_end(state)
  return state


def _first_state(
  experiment: experiment_lib.Experiment,
  run_shape: step_lib.RunShape,
  trainer: step_lib.Trainer,
  mesh: jax.sharding.Mesh,
  checkpointer: Checkpointer,
  evaluators: Sequence[Evaluator],
) -> tuple[int, step_lib.TrainState, Mapping]:
  """Returns the state to begin with; prints what it is made of.

  It is that of the newest whole checkpoint of the workdir. Without one it has
  the weights of config.init, or random ones.

  Returns:
    Updates already applied, the state, and the metadata of its checkpoint.
  """
  config = experiment.config
  form = convert_state.form_of(config, run_shape, trainer, mesh)
  start, state, saved = checkpointer.restore_newest(
    experiment.start, trainer.state.replace(base=None), form
  )
  note(run_summary.text(experiment, mesh, trainer.state))
  if start:
    note(f"resumes     step {start:,} of {experiment.workdir}")
    if config.lora.rank:  # a checkpoint has the adapters and the head alone
      base = experiment.fitted_weights()[0]
      state = weights.with_base(state, base, trainer.state.base)
    return start, state, saved
  state = trainer.init_state()
  if config.init:
    params, report = experiment.fitted_weights()
    state = weights.replace_params(state, params)
    del params  # the host's copy
    note(weights.format_report(report))
  if config.init_head == "linear_probe":
    state, probe = linear_probe.start(experiment, evaluators, state)
    note(f"probe       {probe}")
  return start, state, saved


def _metadata(
  experiment: experiment_lib.Experiment, trainer: step_lib.Trainer, start: int
) -> dict:
  """Returns what a checkpoint states of its run; prints what has changed."""
  metadata = run_summary.metadata(experiment, trainer.state)
  metadata["changes"] = []  # of options, since the run began
  if start:
    note("\n".join(experiment.resumed.notes()))
    workdir, changes = experiment.workdir, experiment.resumed.changes
    metadata["changes"] = resume_rules.trail(workdir, start, changes)
    resume_rules.write(workdir, metadata["changes"])
  return metadata

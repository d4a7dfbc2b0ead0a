"""Trains a Vision Transformer: `python -m vit_jax.train --config=FILE`.

`train_and_evaluate` is the whole of it, in the order in which things come to
exist: mesh, data, model, state, step, evaluators, loop. Running the same
command again goes on where the last checkpoint was written, and ends in the
same bits as a run that was never interrupted.
"""

from vit_jax.config import cli
from vit_jax.runtime import startup

if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  ARGS = cli.parse(
    "vit_jax.train",
    {
      "workdir": "folder of the run (default: runs/<config name>)",
      **cli.PROCESS_FLAGS,
    },
  )

# ruff: noqa: E402
import contextlib
import sys

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import checkpoint, evaluators, sharding, weights
from vit_jax import step as step_lib
from vit_jax.batch import DataError
from vit_jax.config import Config, ConfigError, to_dict
from vit_jax.config.preprocessing import image_size
from vit_jax.data.pipeline import train_batches
from vit_jax.devices import peak_flops
from vit_jax.runtime import host_memory, prepare, processes, run_info
from vit_jax.runtime.progress import Progress
from vit_jax.runtime.throughput import Meter, updates
from vit_jax.runtime.writer import Writer

NUM_PREDICTIONS = 64  # test images kept with what the model said of them
NUM_MISTAKES = 24  # and as many that it got most confidently wrong


def train_and_evaluate(
  config: Config, workdir: str, began: float | None = None
) -> step_lib.TrainState:
  """Trains to the end of the run, from its newest checkpoint if it has one.

  Args:
    config: The run.
    workdir: Folder for checkpoints, metrics, TensorBoard and predictions.
    began: When the command did, as `startup.BEGAN`; None: now.

  Returns:
    The last state.

  Raises:
    ConfigError: Something about the run cannot work; nothing was compiled.
    FloatingPointError: The loss or the gradients are no longer finite.
  """
  with contextlib.ExitStack() as at_exit:  # also after an error, or Ctrl-C
    phases = at_exit.enter_context(startup.Start(began))
    prepare.check(config, workdir)
    phases.ends("checks")
    return _train(config, workdir, phases, at_exit)


def _train(
  config: Config,
  workdir: str,
  phases: startup.Start,
  at_exit: contextlib.ExitStack,
) -> step_lib.TrainState:
  """The run itself; what it registers at `at_exit` is closed in any case."""
  mesh = sharding.make_mesh(config.mesh)

  source = prepare.open_train(config)
  phases.ends("data")
  total_steps = prepare.total_steps(config, source)
  size = image_size(config.data.ops)
  num_classes = config.num_classes or source.num_classes

  facts = step_lib.Facts(num_classes, size, total_steps)
  assembly = step_lib.assemble(config, facts, mesh)
  abstract = assembly.state.params
  metadata = run_info.metadata(config, source, abstract, num_classes)
  checkpointer = checkpoint.Checkpointer(workdir, config.checkpoint)
  at_exit.callback(checkpointer.close)
  start = checkpointer.latest_step() or 0
  progress = Progress(total_steps, start, is_shown=jax.process_index() == 0)
  at_exit.callback(progress.close)
  progress.note(
    run_info.text(config, mesh, source, abstract, total_steps, workdir)
  )

  # The state: resumed, or fresh with given weights, or fresh.
  if start:
    progress.note(f"resumes     step {start:,} of {workdir}")
    for change in run_info.changes(config, workdir).values():
      progress.note(f"changed     {change}")
    state = checkpointer.restore(start, assembly.state)
  else:
    state = assembly.fresh_state()
    if config.init:
      state, report = load_weights(config, state, source.class_names)
      progress.note(report)
  if jax.process_index() == 0:
    run_info.write_json(workdir, "config.json", to_dict(config))
    run_info.write_json(workdir, "metadata.json", metadata)
  phases.ends("model and state")

  batches = train_batches(
    source,
    config.data.ops,
    batch_size=config.data.batch_size,
    seed=config.seed,
    start_step=start,
    shuffle_buffer=config.data.shuffle_buffer,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  judges = evaluators.build(
    config,
    assembly.predict,
    mesh,
    random_params=assembly.fresh_params,
    head=weights.Head(num_classes, source.class_names),
  )
  for judge in judges:
    if judge.config.dataset != config.data.dataset:
      progress.note(f"{judge.config.name:<11} {judge.note}")
  writer = Writer(workdir, start)
  at_exit.callback(writer.close)
  meter = Meter(
    config.data.batch_size,
    mesh.size,
    config.model.train_flops(size, num_classes),
    peak_flops(jax.devices()[0].device_kind),
  )
  at_exit.callback(meter.close)

  def is_due(cadence, step: int) -> bool:
    return step == total_steps or is_multiple(step, cadence.every_steps)

  scoring = evaluators.Background()
  at_exit.callback(scoring.close)

  def write_scores(wait: bool) -> None:
    for step, scores in scoring.finished(wait):
      check_finite(scores, step)
      writer.scalars(step, scores)
      progress.note(run_info.format_scores(step, scores))

  # In case it was stopped between checkpoint and evaluation. Process 0 knows.
  scored = [judge.config.name in writer.scored for judge in judges]
  scored = multihost_utils.broadcast_one_to_all(np.array(scored, bool))
  for judge, is_scored in zip(judges, scored, strict=True):
    if start and not is_scored and is_due(judge.config, start):
      scoring.start(start, judge, state.eval_params)
  phases.ends("evaluators")

  def on_devices():
    for number, batch in enumerate(batches):
      batch = sharding.to_global(batch, mesh)
      if number == 0:
        phases.ends("first batch")
      yield batch

  # The order is fixed: batch, step, log, checkpoint, evaluate. `step` counts
  # updates already applied, so a checkpoint of step n resumes with batch n.
  steps = range(start + 1, total_steps + 1)
  trained = updates(assembly.train_step, state, on_devices(), steps, meter)
  for step, state, metrics, _ in trained:
    saves = is_due(config.checkpoint, step)
    if saves or is_multiple(step, config.log_steps) or step == start + 1:
      values = {k: float(v) for k, v in jax.device_get(metrics).items()}
      check_finite(values, step)  # before a checkpoint can be overwritten
      values["lr"] = float(assembly.schedule(step - 1))
      values["epoch"] = step * config.data.batch_size / source.num_examples
      values |= meter.rates(step)
      writer.scalars(step, {f"train/{k}": v for k, v in values.items()})
      progress.update(step, values)
      progress.note(phases.text("first step"))
      progress.note(meter.advice(values))
    else:
      progress.update(step)

    due = [judge for judge in judges if is_due(judge.config, step)]
    with meter.paused():
      # A run that resumes from this checkpoint looks for no earlier scores.
      write_scores(wait=saves or bool(due))
      if saves:
        checkpointer.save(step, state, {**metadata, "step": step})
      for judge in due:
        scoring.start(step, judge, state.eval_params)
  write_scores(wait=True)

  if start == total_steps:
    progress.note(f"complete    all {total_steps:,} steps were done before")
  save_predictions(judges, state, workdir)
  return state


def is_multiple(step: int, every_steps: int) -> bool:
  """True at multiples of `every_steps`; never where that is 0."""
  return every_steps > 0 and step % every_steps == 0


def check_finite(values: dict[str, float], step: int) -> None:
  """Stops a run that has diverged.

  Raises:
    FloatingPointError: A metric is NaN or infinite.
  """
  bad = [k for k, v in values.items() if not np.isfinite(v)]
  if bad:
    raise FloatingPointError(
      f"{bad[0]} is {values[bad[0]]} at step {step}; older checkpoints are"
      " still finite. Lower config.optim.lr, lengthen"
      " config.optim.warmup_steps, or set config.optim.clip_norm."
    )


def load_weights(
  config: Config,
  state: step_lib.TrainState,
  class_names: tuple[str, ...] | None,
) -> tuple[step_lib.TrainState, str]:
  """Puts the weights of config.init into a fresh state.

  The head stays as it is, unless the weights were trained on the same classes;
  then theirs is put in the order of `class_names`.

  Returns:
    The state at step 0, and a table of what was loaded, resized,
    re-initialised and ignored.
  """
  loaded, report = weights.adapt(
    weights.read(config.init),
    state.params,
    config.model,
    image_size(config.data.ops),
    class_names=class_names,
  )
  params = jax.tree.map(
    lambda fresh, new: (
      fresh if new is None else jax.device_put(new, fresh.sharding)
    ),
    state.params,
    loaded,
  )
  ema = None if state.ema is None else jax.tree.map(jax.numpy.copy, params)
  state = state.replace(params=params, ema=ema)
  return state, weights.format_report(report)


def save_predictions(judges, state, workdir: str) -> None:
  """Keeps images and mistakes of the first classification, for the report."""
  if jax.process_count() > 1:
    return  # this process sees only its own share of the images
  for judge in judges:
    if judge.config.kind == "classification":
      rows = judge.predictions(state.eval_params, NUM_PREDICTIONS, NUM_MISTAKES)
      with (epath.Path(workdir) / "predictions.npz").open("wb") as f:
        np.savez_compressed(f, **rows)
      return


def main(args: cli.Args) -> None:
  """Joins the other processes, looks for faults, trains."""
  startup.use_cache()
  workdir = args.flags["workdir"] or f"runs/{args.config_name}"
  try:
    processes.initialise(args.flags, args.faults)
    host_memory.keep()
    if args.faults:
      prepare.check(args.config, workdir, args.faults)
    train_and_evaluate(args.config, workdir, startup.BEGAN)
  except (ConfigError, DataError, FloatingPointError) as e:
    sys.exit(str(e))
  except KeyboardInterrupt:
    sys.exit("stopped; the same command goes on from the last checkpoint")


if __name__ == "__main__":
  main(ARGS)

"""The callbacks that every run has, in their order."""

import jax
from jax.sharding import Mesh

from vit_jax.callbacks import progress
from vit_jax.callbacks.accounting import KEY as ACCOUNT
from vit_jax.callbacks.accounting import Accounting
from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.learning_rate import LearningRate
from vit_jax.callbacks.nonfinite import NonFinite
from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.predictions import SavePredictions
from vit_jax.callbacks.progress import Progress, note
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.callbacks.startup import Start
from vit_jax.callbacks.throughput import AHEAD, meter_of
from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.experiment import Experiment
from vit_jax.step import Assembly

COST = ("images_seen", "exaflops", "device_hours", "goodput")


class Startup(Callback):
  def __init__(self, start: Start):
    self._start = start
    self._steps = 0

  def on_start(self, start, state, saved):
    self._start.ends("model and state")

  def on_phase(self, name):
    if self._steps == 0 and name == "input":
      self._start.ends("evaluators")
    if self._steps == 0 and name == "compile":
      self._start.ends("first batch")

  def on_step(self, step, batch, metrics):
    self._steps += 1

  def on_log(self, step, values):
    note(self._start.text("first step"))
    return values

  def close(self, error):
    self._start.__exit__(None, None, None)


class Throughput(Callback):
  def __init__(self, run: Experiment, mesh: Mesh):
    self._meter = meter_of(run.config, run.facts, mesh)
    self._ends: list = []
    self._context = None

  def on_phase(self, name):
    if self._context is not None:
      self._context.__exit__(None, None, None)
      self._context = None
    if name == "input":
      self._context = self._meter.input()
    elif name in ("evaluation", "save"):
      self._context = self._meter.paused()
    if self._context is not None:
      self._context.__enter__()

  def on_step(self, step, batch, metrics):
    self._ends.append(self._meter.runs(metrics["loss"]))
    if len(self._ends) > AHEAD:
      self._ends.pop(0).result()

  def on_log(self, step, values):
    values = values | self._meter.rates(step)
    note(self._meter.advice(values))
    return values

  def close(self, error):
    self._meter.close()


class ProgressBar(Callback):
  def __init__(self, total_steps: int):
    self._total_steps = total_steps
    self._progress: Progress | None = None

  def on_start(self, start, state, saved):
    is_first = jax.process_index() == 0
    self._progress = Progress(self._total_steps, start, is_shown=is_first)
    progress.show(self._progress)

  def on_step(self, step, batch, metrics):
    self._progress.update(step)

  def on_log(self, step, values):
    shown = {k: v for k, v in values.items() if "/" not in k and k not in COST}
    self._progress.update(step, shown)
    return values

  def close(self, error):
    progress.show(None)
    if self._progress:
      self._progress.close()


def default_callbacks(
  experiment: Experiment,
  trainer: Assembly,
  mesh: Mesh,
  evaluators: list[Evaluator],
  checkpointer: Checkpointer,
  lock: RunLock,
  opening: Start,
  phases: Phases,
) -> list[Callback]:
  """Returns the callbacks of a run; `on_log` goes through them in this order.

  Args:
    experiment: The run.
    trainer: Its model and step.
    mesh: Its mesh.
    evaluators: Its evaluators, whose predictions are saved at the end.
    checkpointer: Its checkpoints.
    lock: Lock of its folder.
    opening: Measures the time to the first step.
    phases: Clock of this process.
  """
  config, facts = experiment.config, experiment.facts
  flops = config.model.train_flops(facts.image_size, facts.num_classes)
  return [
    phases,
    lock,
    NonFinite(
      config, experiment.workdir, experiment.data, checkpointer.newest, note
    ),
    LearningRate(trainer.schedule),
    Throughput(experiment, mesh),
    Accounting(
      config.data.batch_size,
      flops,
      mesh.size,
      phases,
      experiment.data.num_examples,
      experiment.workdir,
      experiment.init_metadata.get(ACCOUNT),
      note,
    ),
    ProgressBar(experiment.facts.total_steps),
    Startup(opening),
    SavePredictions(evaluators, experiment.workdir),
  ]

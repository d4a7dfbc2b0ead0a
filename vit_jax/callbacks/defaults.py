"""The callbacks that every run has, in their order."""

import jax
from jax.sharding import Mesh

from vit_jax.callbacks.accounting import KEY as ACCOUNT
from vit_jax.callbacks.accounting import Accounting
from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.nonfinite import NonFinite
from vit_jax.callbacks.predictions import SavePredictions
from vit_jax.callbacks.progress import Progress, note
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.callbacks.startup import Startup
from vit_jax.callbacks.throughput import LearningRate, Throughput
from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.devices import peak_flops
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.experiment import Experiment
from vit_jax.step import Trainer


def default_callbacks(
  experiment: Experiment,
  trainer: Trainer,
  mesh: Mesh,
  evaluators: list[Evaluator],
  checkpointer: Checkpointer,
  lock: RunLock,
  startup: Startup,
) -> list[Callback]:
  """Returns the callbacks of every run, which come before the user's own.

  Args:
    experiment: The run.
    trainer: Its model and step.
    mesh: Its mesh.
    evaluators: Its evaluators, whose predictions are saved at the end.
    checkpointer: Its checkpoints.
    lock: Lock of its folder.
    startup: Measures the time to the first step.
  """
  config, run_shape = experiment.config, experiment.run_shape
  flops = experiment.learner.flops(config.model, run_shape)
  more = []
  if config.init_head == "linear_probe":
    from vit_jax.finetune.linear_probe import LinearProbe

    more.append(LinearProbe(experiment, evaluators))
  return [
    lock,
    NonFinite(
      config, experiment.workdir, experiment.data, checkpointer.newest, note
    ),
    LearningRate(trainer.schedule),
    Throughput(
      config.data.batch_size,
      mesh.size,
      flops,
      None
      if config.is_partial
      else peak_flops(mesh.devices.flat[0].device_kind),
      mesh.local_devices,
    ),
    Accounting(
      config.data.batch_size,
      flops,
      mesh.size,
      experiment.data.num_examples,
      experiment.workdir,
      experiment.init_metadata.get(ACCOUNT),
      startup.began,
      note,
    ),
    Progress(run_shape.total_steps, is_shown=jax.process_index() == 0),
    startup,
    SavePredictions(evaluators, experiment.workdir),
    *more,
  ]

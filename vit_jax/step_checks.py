"""What is checked of an objective before its step is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from vit_jax import collectives, names, sharding
from vit_jax.batch import RunShape
from vit_jax.config import Config
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Frozen, Learner
from vit_jax.objectives.row_check import mixed_rows

ROWS = 2  # of the abstract batch


def errors(
  config: Config, run_shape: RunShape, learner: Learner, label: tuple[int, ...]
) -> list[str]:
  """Returns why the step cannot compute the loss of an objective.

  The losses of `vit_jax` itself are checked by its tests, and not here.

  Args:
    config: The run.
    run_shape: Its sizes.
    learner: What the objective has made.
    label: Shape of a record's label.
  """
  where = f"config.objective.kind: got {config.objective.kind!r}"
  if learner.whole_batch and config.optim.microbatch:
    return [
      f"config.optim.microbatch: got {config.optim.microbatch}, expected None:"
      f" the loss of config.objective.kind={config.objective.kind!r} needs all"
      " rows of a batch at once."
    ]
  if learner.whole_batch or not names.is_path(config.objective.kind):
    return []
  shape = (1, *run_shape.image_size, config.model.channels)
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(
    lambda key: only_params(learner.module.init(key, jnp.zeros(shape))), key
  )
  step = jax.ShapeDtypeStruct((), "int32")
  batch = _targets(config, learner, params, _batch(config, label), key, step)
  if fault := mixed_rows(learner.loss, params, batch, key, step):
    return [f"{where}: {fault}"]
  return []


def _batch(
  config: Config, label: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
  mesh = _one_device()
  batch = sharding.abstract_batch(ROWS, config.view_shapes, label, mesh)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  return jax.eval_shape(config.objective.paired, batch)


def _targets(config, learner, params, batch, key, step) -> dict:
  """Returns the batch with the shapes of its targets."""
  if learner.targets is None:
    return batch
  teacher = params
  if isinstance(learner.teacher, Frozen):
    teacher = jax.eval_shape(lambda: learner.teacher.model.params)
  memory = jax.eval_shape(lambda: dict(learner.memory or {}))

  def targets(*arguments):
    found = learner.targets(*arguments, collectives.Over())
    return found.rows, found.shared

  rows, shared = jax.eval_shape(
    jax.shard_map(
      targets, mesh=_one_device(), in_specs=P(), out_specs=P(), check_vma=False
    ),
    *(teacher, batch, key, step, memory),
  )
  batch = batch if rows is None else {**batch, "targets": rows}
  return batch if shared is None else {**batch, "shared": shared}


def _one_device() -> jax.sharding.Mesh:
  device = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  return jax.sharding.Mesh(device, sharding.AXES)

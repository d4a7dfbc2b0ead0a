"""Computes one step of a run again, and finds what in it is not a number.

`step("runs/b16", 1200)` goes on from the newest checkpoint before that step, to
that step, on the devices that there are, and writes nothing.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import experiment, sharding, train_batches, weights
from vit_jax import step as step_lib
from vit_jax.batch import Data
from vit_jax.checkpointing import checkpointer, convert_state
from vit_jax.config import MeshConfig, freeze
from vit_jax.sharding import path_of


def step(workdir: str, number: int, data: Data | None = None) -> dict[str, Any]:
  """Repeats a step of a run in this process, and prints what is found.

  Args:
    workdir: Folder of the run.
    number: The step, from 1.
    data: The training data, if they were given to the run; None: those of its
      config.data.

  Returns:
    loss and grad_norm as the run had them; records: number -> loss of the rows
    whose own loss is not finite; params: paths of the parameters whose gradient
    is not.

  Raises:
    ValueError: No checkpoint of the run, nor its beginning, is before the step.
  """
  folder = epath.Path(workdir)
  config = freeze(json.loads((folder / "config.json").read_text()))
  if number < 1:
    raise ValueError(f"got step {number}, expected 1 or more.")
  source = checkpointer.Checkpointer(workdir, config.checkpoint)
  start = max((s for s in source.steps() if s < number), default=0)
  if start:
    config = dataclasses.replace(config, init=None)
  if sharding.mesh_faults(config):
    mesh = MeshConfig(data=1, fsdp=-1)
    print(
      f"{config.mesh} is for other devices: the step is repeated with {mesh}"
    )
    config = dataclasses.replace(config, mesh=mesh)
  run = experiment.setup(config, data=data)
  mesh = sharding.make_mesh(config.mesh)
  assembly = step_lib.assemble(config, run.facts, mesh)
  metadata = {}
  if start:
    metadata = checkpointer.load_metadata(
      str(folder / checkpointer.FOLDER / str(start))
    )
    form_of = convert_state.form_of(config, run.facts, assembly, mesh)
    like, convert = form_of(metadata)
    state = convert(source.restore(start, like))
  else:
    state = assembly.fresh_state()
    if config.init:
      state = weights.replace_params(state, run.fitted_weights()[0])
  source.close()
  batches = train_batches.batches(run, start, metadata)
  print(f"begins at step {start}")
  for taken in range(start + 1, number):
    batch = sharding.to_global(next(batches), mesh)
    state, metrics = assembly.train_step(state, batch)
    print(_values(taken, metrics))
  batch = sharding.to_global(next(batches), mesh)
  loss_fn, paired = _loss(config, run.facts, state, batch)
  records = _records(loss_fn, state.params, paired)
  print(
    f"records whose own loss is not finite: {len(records)} of"
    f" {config.data.batch_size}"
    + "".join(f"\n  record {n}: {loss}" for n, loss in records.items())
  )
  number_of_parts = sharding.microbatches_of(config, mesh)
  paths = _params(loss_fn, state.params, paired, number_of_parts)
  _, metrics = assembly.train_step(state, batch)
  print(_values(number, metrics))
  print(
    f"parameters whose gradient is not finite: {len(paths)}"
    + "".join(f"\n  {path}" for path in paths)
  )
  return {
    "loss": float(metrics["loss"]),
    "grad_norm": float(metrics["grad_norm"]),
    "records": records,
    "params": paths,
  }


def _loss(
  config: Any, facts: step_lib.Facts, state: Any, batch: dict
) -> tuple[Callable[[Any, dict], jax.Array], dict]:
  """Returns the step's function, (params, rows) -> loss, and its rows."""
  _, loss_fn = config.objective.make(config.model, facts)
  root = jax.random.fold_in(jax.random.key(config.seed), 1)
  rng = jax.random.fold_in(root, state.step)
  loss = lambda params, rows: loss_fn(params, rows, rng)[0]
  return loss, config.objective.paired(batch)


def _records(loss: Callable, params: Any, batch: dict) -> dict[int, float]:
  """Returns the records whose own loss is not finite, and that."""

  @jax.jit
  def losses(params, batch):
    one = lambda row: loss(params, jax.tree.map(lambda x: x[None], row))
    return jax.lax.map(one, batch)

  index, found = batch["index"], losses(params, batch)
  found = zip(np.asarray(index), np.asarray(found), strict=True)
  return {int(n): float(x) for n, x in found if not np.isfinite(x)}


def _params(loss: Callable, params: Any, batch: dict, number: int) -> list[str]:
  """Returns the paths of the parameters whose gradient is not finite.

  As in the step, the gradients of so many microbatches are added up: those of
  the whole batch at once may not fit.
  """

  @jax.jit
  def are_finite(params, batch):
    # The rows of a device stay on it.
    parts = jax.tree.map(
      lambda x: x.reshape(-1, number, *x.shape[1:]).swapaxes(0, 1), batch
    )
    grad = jax.grad(loss)
    add = lambda sums, part: (
      jax.tree.map(jnp.add, sums, grad(params, part)),
      None,
    )
    sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: jnp.isfinite(g).all(), sums)

  leaves = jax.tree_util.tree_leaves_with_path(are_finite(params, batch))
  return [path_of(path) for path, is_finite in leaves if not is_finite]


def _values(number: int, metrics: dict) -> str:
  loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
  return f"step {number}: loss {loss:.6g}, grad_norm {norm:.4g}"

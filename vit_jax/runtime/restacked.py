"""Resumes a run with its blocks in a scan from one with a loop, or back.

The parameters of a loop are those of each block; of a scan, all blocks in one
array. The numbers are the same, and so are those of the optimizer and of the
average.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.config import Config
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.step import Assembly, Facts, TrainState, assemble, shardings_of


def restore(
  read: Callable[[TrainState], TrainState],
  written: dict[str, Any],
  config: Config,
  facts: Facts,
  assembly: Assembly,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns the state that a checkpoint has, in the form of this run.

  Args:
    read: Reads the checkpoint into arrays like an abstract state.
    written: Metadata of the checkpoint; its "config" tells the form.
    config: This run.
    facts: Facts of its data.
    assembly: This run's, of which only the state is used.
    mesh: Mesh of the state.
  """
  scan = getattr(config.model, "scan", None)
  model = written.get("config", {}).get("model", {})
  if scan is None or bool(model.get("scan", scan)) == scan:
    return read(assembly.state)
  model = dataclasses.replace(config.model, scan=not scan)
  other = assemble(dataclasses.replace(config, model=model), facts, mesh).state
  convert = stack_blocks if scan else unstack_blocks

  def is_like_params(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.keys() == other.params.keys()

  def in_this_form(state: TrainState) -> TrainState:
    return jax.tree.map(
      lambda x: convert(x) if is_like_params(x) else x,
      state,
      is_leaf=is_like_params,
    )

  made = jax.jit(in_this_form, out_shardings=shardings_of(assembly.state))
  return made(read(other))

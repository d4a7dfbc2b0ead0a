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
from vit_jax.sharding import shardings_of
from vit_jax.step import Assembly, Facts, TrainState, assemble

Form = tuple[TrainState, Callable[[TrainState], TrainState]]


def form_of(
  config: Config, facts: Facts, assembly: Assembly, mesh: jax.sharding.Mesh
) -> Callable[[dict[str, Any]], Form]:
  """Returns what tells in which form a checkpoint has the state of a run.

  Args:
    config: The run.
    facts: Facts of its data.
    assembly: The run's, of which only the state is used.
    mesh: Mesh of the state.

  Returns:
    Metadata of a checkpoint, whose "config" tells it -> (the abstract state as
    it was written, a function from that to the form of this run).
  """
  scan = getattr(config.model, "scan", None)
  convert = stack_blocks if scan else unstack_blocks

  def form(written: dict[str, Any]) -> Form:
    model = written.get("config", {}).get("model", {})
    if scan is None or bool(model.get("scan", scan)) == scan:
      return assembly.state, lambda state: state
    model = dataclasses.replace(config.model, scan=not scan)
    other = dataclasses.replace(config, model=model)
    state = assemble(other, facts, mesh).state

    def is_like_params(tree: Any) -> bool:
      return isinstance(tree, dict) and tree.keys() == state.params.keys()

    def in_this_form(state: TrainState) -> TrainState:
      return jax.tree.map(
        lambda x: convert(x) if is_like_params(x) else x,
        state,
        is_leaf=is_like_params,
      )

    shardings = shardings_of(assembly.state)
    return state, jax.jit(in_this_form, out_shardings=shardings)

  return form

"""Resumes a run from a checkpoint whose state has another form.

- Blocks in a loop become blocks in a scan, or the reverse: a loop has the
  parameters of each block, a scan has all blocks in one array. The numbers of
  parameters, optimizer and average stay the same.
- A part of the optimizer is turned on or off: clipping and weight decay have no
  numbers, but shift the places of the others; an average starts as the
  parameters; accumulators of another type are rounded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.checkpointing.checkpointer import FormOf
from vit_jax.config import Config, build
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.sharding import shardings_of
from vit_jax.step import Trainer, TrainState

# Options of config.optim that change the form of the state, but lose nothing.
PARTS = ("clip_norm", "weight_decay", "ema_decay", "accumulator_dtype")


def form_of(
  config: Config, trainer: Trainer, assemble: Callable[[Config], Trainer]
) -> FormOf:
  """Returns a function that finds the form of a checkpoint's state.

  Args:
    config: The run.
    trainer: Its trainer, of which only the state is used.
    assemble: Returns the trainer of another config, on the mesh of the run.

  Returns:
    A function of the metadata of a checkpoint, which uses their "config". It
    returns the abstract state as it was written, and a function that converts
    such a state to the form of this run.
  """

  def form(written: dict[str, Any]):
    other = _as_written(config, written.get("config", {}))
    like = trainer.state
    if other == config:
      return like, lambda state: state
    state = assemble(other).state
    if jax.tree.flatten(state) == jax.tree.flatten(like):
      return like, lambda state: state  # only values of options differ
    is_restacked = other.model != config.model
    convert = (
      unstack_blocks if getattr(other.model, "scan", 0) else stack_blocks
    )

    def is_like_params(tree: Any) -> bool:
      return isinstance(tree, dict) and tree.keys() == state.params.keys()

    def in_this_form(state: TrainState) -> TrainState:
      if is_restacked:
        # Callbacks see separate blocks in both forms.
        memory = state.memory
        state = jax.tree.map(
          lambda x: convert(x) if is_like_params(x) else x,
          state.replace(memory={}),
          is_leaf=is_like_params,
        ).replace(memory=memory)
      shapes, tree = jax.tree.flatten(like.opt_state)
      leaves = jax.tree.leaves(state.opt_state)  # in the order of the parts
      leaves = [x.astype(s.dtype) for x, s in zip(leaves, shapes, strict=True)]
      return state.replace(
        opt_state=jax.tree.unflatten(tree, leaves),
        averages={
          name: state.averages.get(name, state.params) for name in like.averages
        },
      )

    # Arrays that keep their shape are donated: two states may not fit.
    donated = () if is_restacked else (0,)

    def converted(state: TrainState) -> TrainState:
      # What is not in the checkpoint is added later.
      wanted = like.replace(
        fixed={k: like.fixed[k] for k in state.fixed}, memory=state.memory
      )
      return jax.jit(
        in_this_form,
        donate_argnums=donated,
        out_shardings=shardings_of(wanted),
      )(state)

    return state, converted

  return form


def _as_written(config: Config, was: dict[str, Any]) -> Config:
  """Returns the config with an older one's options that shape the state."""
  model, optim = (
    part if isinstance(part := was.get(key), dict) else {}
    for key in ("model", "optim")
  )
  scan = bool(model.get("scan", config.model.scan))
  if scan != config.model.scan:  # of a family that has the option
    other = dataclasses.replace(config.model, scan=scan)
    config = dataclasses.replace(config, model=other)
  read, errors = build({"optim": {k: optim[k] for k in PARTS if k in optim}})
  if errors:
    return config
  parts = {k: getattr(read.optim, k) for k in PARTS if k in optim}
  optim = dataclasses.replace(config.optim, **parts)
  return dataclasses.replace(config, optim=optim)

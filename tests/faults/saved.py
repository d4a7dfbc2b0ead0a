"""Small states, saved and compared: what trials of checkpoints share."""

import contextlib
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import sharding, step
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.config import CheckpointConfig, defaults, freeze

METADATA = {"config": {"seed": 0}, "class_names": ["a", "b"]}


class Saved(NamedTuple):
  """A folder with the checkpoints of steps 1 and 2, and their bits.

  state: Abstract.
  states: Step -> flat bytes of each array.
  """

  folder: pathlib.Path
  state: Any
  states: dict[int, list[bytes]]


def tiny(fsdp: int = 1) -> Any:
  """Returns the abstract state of a small ViT with an average."""
  c = defaults()
  c.total_steps = 20
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.ops, c.data.batch_size = "decode|resize(16)", 16
  c.optim.ema_decay = 0.9
  c.mesh.fsdp = fsdp
  config = freeze(c)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:fsdp])
  return step.assemble(config, step.RunShape(10, (16, 16), 20), mesh).state


def made_up(shapes: Any, seed: int) -> Any:
  """Returns a state of these shapes, no two of its numbers alike."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jax.device_put(
      np.asarray(100 * rng.normal(size=x.shape), x.dtype), x.sharding
    ),
    shapes,
  )


def bits(tree: Any) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def saved(folder: pathlib.Path) -> Saved:
  shapes = tiny()
  states = {n: made_up(shapes, n) for n in (1, 2)}
  checkpointer = checkpointer_lib.Checkpointer(str(folder), CheckpointConfig())
  for n, state in states.items():
    checkpointer.save_now(n, state, {**METADATA, "step": n})
  checkpointer.close()
  return Saved(folder, shapes, {n: bits(s) for n, s in states.items()})


def assert_no_own_stack(text: str) -> None:
  """Raises AssertionError if a stack in the text has a frame of the package.

  Threads of Orbax and asyncio print stacks of their own when a save fails.
  """
  assert not re.search(r'File ".*/vit_jax/.*", line', text), text[-3000:]


@contextlib.contextmanager
def captured_stderr() -> Iterator[io.StringIO]:
  """Catches stderr."""
  out = io.StringIO()
  with contextlib.redirect_stderr(out):
    yield out

"""One tiny model and its parts, shared by the tests."""

import contextlib
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from vit_jax import sharding, step
from vit_jax.config import Config, defaults, freeze
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build

NUM_CLASSES = 10


def config(**changes) -> Config:
  """Two blocks of width 32 on 16 px, batch 16; `a__b=x` sets config.a.b."""
  c = defaults()
  c.total_steps = 20
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 2
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.ops = "decode|resize(16)"
  c.data.batch_size = 16
  c.optim.lr = 1e-2
  c.optim.clip_norm = 1.0
  apply(c, changes)
  return freeze(c)


# Options that make the tiny model another one, on the same images.
HYBRID = dict(
  model__variant="R50+Ti/16", model__stage_blocks=(1,), model__stage_width=0.5
)
RESNET = dict(
  model__name="bit",
  model__variant="R26x0.5",
  model__stage_blocks=(1, 1),
  model__width=None,
  model__depth=None,
  model__mlp_dim=None,
  model__num_heads=None,
)


def apply(c, changes: dict) -> None:
  """Sets options of a config: {"model__width": 3} sets c.model.width."""
  for key, value in changes.items():
    *parents, leaf = key.split("__")
    inner = c
    for parent in parents:
      inner = inner[parent]
    inner[leaf] = value


def ViT(num_classes: int, patch: int, **options):
  """The linen module with these options of its family."""
  return build(ViTConfig(variant=f"B/{patch}", **options), num_classes)


def in_step(fn):
  """Wraps a function as a step does: images are the device's own; jitted."""
  mesh = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])
  return jax.jit(
    jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  )


def equations(jaxpr, loops=()):
  """Yields every equation with the primitives of the loops around it."""
  for equation in jaxpr.eqns:
    yield equation, loops
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        is_loop = equation.primitive.name in ("scan", "while")
        name = (equation.primitive.name,) if is_loop else ()
        yield from equations(inner, loops + name)


class Parts:
  """What train.py assembles, with the random batches of `batch`."""

  def __init__(self, cfg: Config, devices=None):
    self.config = cfg
    self.mesh = sharding.make_mesh(cfg.mesh, devices)
    run_shape = step.RunShape(NUM_CLASSES, (16, 16), cfg.total_steps)
    self.trainer = step.assemble(cfg, run_shape, self.mesh)
    self.model, self.init = self.trainer.module, self.trainer.init
    self.shapes, self.train_step = self.trainer.state, self.trainer.train_step

  def state(self):
    return self.trainer.init_state()

  def run(self, num_steps: int, state=None):
    """Returns the state and the metrics of every step, on random batches."""
    state = self.state() if state is None else state
    metrics = []
    for i in range(int(state.step), int(state.step) + num_steps):
      batch_i = sharding.to_global(batch(i, self.config), self.mesh)
      state, values = self.train_step(state, batch_i)
      metrics.append({k: float(v) for k, v in values.items()})
    return state, metrics


def batch(seed: int, cfg: Config) -> dict:
  """Noise whose brightness depends on the class; the last row is masked."""
  rng = np.random.default_rng(seed)
  rows = cfg.data.batch_size
  label = rng.integers(0, NUM_CLASSES, rows).astype(np.int32)
  noise = rng.integers(0, 40, (rows, 16, 16, 3))
  return {
    "image": (noise + 20 * label[:, None, None, None]).astype(np.uint8),
    "label": label,
    "mask": np.arange(rows) < rows - 1,
    "index": np.arange(rows, dtype=np.int64),
  }


class Data:
  """Training data in memory, for `train_and_evaluate(..., data=...)`."""

  num_examples, num_classes, class_names = 160, NUM_CLASSES, None

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      step += 1
      yield batch(step, config())


def shapes(module, images=(1, 16, 16, 3)):
  """Returns the shapes of a module's parameters, without computing them."""
  images = jax.ShapeDtypeStruct(images, "float32")
  return jax.eval_shape(module.init, jax.random.key(0), images)["params"]


def random_params(module, images=(1, 16, 16, 3), std=0.2):
  """Returns parameters without zeros, unlike the initial ones."""
  rng = np.random.default_rng(1)
  draw = lambda leaf: rng.normal(0, std, leaf.shape).astype("f")
  return jax.tree.map(draw, shapes(module, images))


@contextlib.contextmanager
def devices(count: int):
  """In its body, runs have only so many devices."""
  make_mesh = sharding.make_mesh
  few = lambda mesh, own=None: make_mesh(mesh, own or jax.devices()[:count])
  with mock.patch.object(sharding, "make_mesh", few):
    yield

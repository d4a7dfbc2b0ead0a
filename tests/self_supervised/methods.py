"""Every method as small as shows its facts: config, batch, start, step."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import tiny
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from vit_jax import sharding, step
from vit_jax.checkpointing.checkpointer import write_params
from vit_jax.collectives import Over
from vit_jax.config import MeshConfig, to_dict
from vit_jax.data.preprocessing import image_size
from vit_jax.models import build
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.objectives import Classification, MaskedPatch
from vit_jax.self_supervised.dino import DINO
from vit_jax.self_supervised.dinov2 import DINOv2
from vit_jax.self_supervised.distillation import Distillation, Teacher
from vit_jax.self_supervised.mae import MAE

DATA = pathlib.Path(__file__).parents[1] / "data"
HEAD = dict(
  prototypes=24,
  hidden=16,
  bottleneck=8,
  local_crops=3,
  local_ops="decode|resize(8)",
)
METHODS = {
  "mae": MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
  "dino": DINO(**HEAD, temperature_steps=3, teacher_temperature_start=0.02),
  "dinov2": DINOv2(**HEAD, koleo_group=4),
  "distillation": Distillation(teacher="x", loss="hard", mixup=1.0),
  "masked_patch": MaskedPatch(target="small"),
  "mixing": Classification(mixup=0.4, cutmix=1.0),
}
DINOV2 = dict(model__name="modern", model__layer_scale=0.1, model__registers=1)
# What their models are beside `config`.
MODELS = {
  "dino": dict(model__variant="Ti/4"),
  "dinov2": dict(model__variant="Ti/4", **DINOV2),
}


@functools.cache
def published(file="ssl_dino"):
  """Returns what the authors' code made, by name, as in tests/data."""
  with np.load(DATA / f"{file}.npz") as arrays:
    return dict(arrays)


def below(file, prefix):
  """Returns the arrays under a name, by the rest of their names."""
  start = f"{prefix}/"
  return {
    k.removeprefix(start): v for k, v in file.items() if k.startswith(start)
  }


def on_devices(number, fn, *args):
  """Returns what a function of (rows of a device, ..., over) gives by rows."""
  sizes = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[number]
  mesh = MeshConfig(data=sizes[0], fsdp=sizes[1])
  rows = P(("data", "fsdp"))
  mapped = jax.shard_map(
    lambda *x: fn(*x, Over()),
    mesh=sharding.make_mesh(mesh, jax.devices()[:number]),
    in_specs=rows,
    out_specs=rows,
    check_vma=False,
  )
  return jax.jit(mapped)(*args)


def config(name, options=None, **changes):
  """A method on one block and 8 images of 16 px; `a__b=x` as in `tiny`.

  SGD: Adam divides by gradients that are nothing but rounding.
  """
  small = dict(model__depth=1, data__batch_size=8)
  small |= dict(optim__name="sgd", optim__lr=0.05)
  made = tiny.config(**small | MODELS.get(name, {}) | changes)
  objective = dataclasses.replace(METHODS[name], **options or {})
  return dataclasses.replace(made, objective=objective)


def batch(seed, made):
  """Views of noise, brighter for higher classes; two rows do not count."""
  rng = np.random.default_rng(seed)
  rows = made.data.batch_size
  label = rng.integers(0, tiny.NUM_CLASSES, rows).astype(np.int32)

  def pixels(shape):
    light = 10 * label.reshape(-1, *(1,) * len(shape))
    return (rng.integers(0, 150, (rows, *shape)) + light).astype(np.uint8)

  return {
    **{name: pixels(shape) for name, shape in made.view_shapes.items()},
    "label": label,
    "mask": ~np.isin(np.arange(rows), [3, rows - 1]),
    "index": rng.permutation(1000)[:rows].astype(np.int64),
  }


def drawn(shapes):
  """Random parameters of these shapes, each by its path: nothing compiles."""
  flat = flatten_dict(shapes, sep="/")

  def value(path, shape):
    noise = np.random.default_rng([*path.encode()]).normal(size=shape)
    return np.float32(0.2 * noise + path.endswith("scale"))

  return unflatten_dict({k: value(k, x.shape) for k, x in flat.items()}, "/")


def params_of(module, size=16):
  """Random parameters of a linen module for images of this side or size."""
  images = jax.ShapeDtypeStruct((1, *np.broadcast_to(size, 2), 3), np.float32)
  return drawn(jax.eval_shape(module.init, jax.random.key(0), images)["params"])


@dataclasses.dataclass(frozen=True)
class Named(Teacher):
  """What `vit_jax.load` returns, as far as a method reads it."""

  class_names: tuple[str, ...] | None = None


def teacher(num_classes=tiny.NUM_CLASSES, side=16, names=None, **changes):
  """A random model, of another width than the student."""
  small = dict(model__width=16, model__depth=1)
  model = tiny.config(**small | changes).model
  params = params_of(build(model, num_classes), side)
  return Named(model, params, num_classes, (side, side), names)


def write(path, made, params, num_classes=0):
  """Writes the checkpoint of a run with these parameters; returns its path."""
  size = image_size(made.data.ops)
  about = dict(
    config=to_dict(made),
    image_size=[*size],
    grid=[*made.model.grid(size)],
    has_cls_row=made.model.has_cls_row,
    num_classes=num_classes,
    loss=made.objective.head_loss,
    objective_parameters=made.objective.own,
  )
  write_params(str(path), params, about)
  return str(path)


class Run:
  """The step of a config on some devices, and batches of `batch`."""

  def __init__(self, made, devices=1, models=None):
    if made.objective.kind == "distillation":
      models = models or {"teacher": teacher()}
    self.config = made
    self.mesh = sharding.make_mesh(made.mesh, jax.devices()[:devices])
    size = image_size(made.data.ops)
    self.shape = step.RunShape(tiny.NUM_CLASSES, size, made.total_steps)
    self.learner = made.objective.make(made.model, self.shape, models or {})
    self.trainer = step.assemble(made, self.shape, self.mesh, (), self.learner)

  def start(self):
    """Returns a first state with random parameters, also of a zero head.

    They follow from their paths, and are equal for blocks in a scan.
    """
    model, like = self.config.model, self.trainer.state
    zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    unstack = lambda params: unstack_blocks(params, model)
    params = drawn(jax.eval_shape(unstack, like.model_params))
    if getattr(model, "scan", False):
      params = stack_blocks(params, model)
    state = jax.tree.map(zeros, like).with_params(params)
    if (frozen := self.learner.frozen) is None:
      return state
    return state.with_fixed("teacher", frozen.model.params, like)

  def steps(self, number, state=None):
    """Returns the state after some steps, and the metrics of each."""
    state, metrics = self.start() if state is None else state, []
    for i in range(int(state.step), int(state.step) + number):
      rows = sharding.to_global(batch(i, self.config), self.mesh)
      state, values = self.trainer.train_step(state, rows)
      metrics.append({k: float(v) for k, v in values.items()})
    return state, metrics

  def outcome(self, number=3):
    """Returns metrics, memory and running means of some steps, on the host."""
    state, metrics = jax.device_get(self.steps(number))
    means = {
      k: unstack_blocks(v, self.config.model) for k, v in state.averages.items()
    }
    return metrics, state.memory, means


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def entropy(p):
  return -(p * np.log(np.maximum(p, 1e-300))).sum(-1)


def assert_close(one, other, rtol=2e-5, atol=5e-6):
  """Compares outcomes: float32, in another order of sums."""
  (metrics, *arrays), (others, *other_arrays) = one, other
  for a, b in zip(metrics, others, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      # A divergence is a small difference of sums of about 1.
      np.testing.assert_allclose(a[key], b[key], rtol, 1e-6, err_msg=key)
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol, atol)
  jax.tree.map(compare, arrays, other_arrays)

"""What is checked of an objective before its step is compiled."""

import pathlib
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

from vit_jax import collectives, names, sharding
from vit_jax.batch import RunShape
from vit_jax.config import Config
from vit_jax.models import build
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Learner
from vit_jax.objectives.row_check import mixed_rows
from vit_jax.options import shown, unexpected

ROWS = 2  # of the abstract batch


def errors(
  config: Config, run_shape: RunShape, learner: Learner, label: tuple[int, ...]
) -> list[str]:
  """Returns why the step cannot compute the loss of an objective.

  Objectives and families of `vit_jax` itself are checked by its tests, and not
  here.

  Args:
    config: The run.
    run_shape: Its sizes.
    learner: What the objective has made.
    label: Shape of a record's label.
  """
  where = f"config.objective.kind: got {config.objective.kind!r}"
  if not names.is_path(config.objective.kind):  # it works with our families
    where = f"config.model.name: got {config.model.name!r}"
  if learner.whole_batch and config.optim.microbatch:
    return [
      f"config.optim.microbatch: got {config.optim.microbatch}, expected None:"
      f" the loss of config.objective.kind={config.objective.kind!r} needs all"
      " rows of a batch at once."
    ]
  average, decay = learner.average, config.optim.ema_decay
  if average is not None and average.is_published and decay is not None:
    expected = "None: the objective's running mean is what is evaluated"
    return [unexpected("config.optim.ema_decay", decay, expected)]
  kinds = config.objective.kind, config.model.name
  if not any(map(names.is_path, kinds)):
    return []
  shape = (1, *run_shape.image_size, config.model.channels)
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(
    lambda key: only_params(learner.module.init(key, jnp.zeros(shape))), key
  )
  if names.is_path(config.objective.kind):
    if errors := _parameter_errors(config, params, key, shape):
      return [f"{where}, {error}" for error in errors]
  step = jax.ShapeDtypeStruct((), "int32")
  try:
    batch = _batch(config, label)
    if learner.targets is not None:
      arguments = _teacher(learner, params), batch, key, step
      if fault := _targets_fault(learner, *arguments):
        return [f"{where}, {fault}"]
      batch = batch | _targets(learner, *arguments)
    if learner.whole_batch:
      _on_one_device(_checked(learner.loss), params, batch, key, step)
    elif fault := mixed_rows(_checked(learner.loss), params, batch, key, step):
      return [f"{where}, {fault}"]
  except Exception as e:  # code of one's own may raise anything
    return [
      f"{where}, whose loss or targets raise {type(e).__name__}{_place(e)}: {e}"
    ]
  return []


def _parameter_errors(config, params, key, shape) -> list[str]:
  """Returns which parameter belongs to neither the network nor the objective.

  Such a run could not be loaded.
  """
  model, own = config.model, config.objective.own
  network = jax.eval_shape(
    lambda key: build(model, 0).init(key, jnp.zeros(shape))["params"], key
  )
  got, expected = (flatten_dict(x, sep="/").keys() for x in (params, network))
  others = [
    name
    for name in got - expected
    if not (model.is_head(name) or (own and name.startswith(own)))
  ]
  rule = (
    "; expected the network's parameters at the root (flax.linen.share_scope),"
    " and those of the objective under the prefix `own`."
  )
  if missing := sorted(expected - got):
    return [f"whose module has no {missing[0]}{rule}"]
  if others:
    return [f"whose module has {sorted(others)[0]}, but own={own!r}{rule}"]
  return []


def _place(error: Exception) -> str:
  """Returns the last line of the user's code that an error comes from."""
  ours = str(pathlib.Path(__file__).parent)
  lines = [
    f" in {frame.filename}, line {frame.lineno}"
    for frame in traceback.extract_tb(error.__traceback__)
    if "site-packages" not in frame.filename
    and not frame.filename.startswith(ours)
  ]
  return lines[-1] if lines else ""


def _checked(loss: Callable) -> Callable:
  """Returns a loss that raises TypeError if its results have another form."""

  def checked(*args):
    result = loss(*args)
    is_right = isinstance(result, tuple) and len(result) == 3
    if not is_right or not all(
      isinstance(x, tuple) and len(x) == 2 for x in dict(result[2]).values()
    ):
      raise TypeError(
        f"the loss returns {shown(result)}, expected (sum, count, {{name:"
        " (sum, count)})."
      )
    return result

  return checked


def _on_one_device(fn: Callable, *args):
  """Returns the shapes of what `fn` returns inside of a step."""
  return jax.eval_shape(
    jax.shard_map(
      lambda *args: fn(*args, collectives.Over()),
      mesh=_one_device(),
      in_specs=P(),
      out_specs=P(),
      check_vma=False,
    ),
    *args,
  )


def _batch(
  config: Config, label: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
  mesh = _one_device()
  batch = sharding.abstract_batch(ROWS, config.view_shapes, label, mesh)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  return jax.eval_shape(config.objective.paired, batch)


def _teacher(learner, params):
  """Returns the shapes of the parameters that `targets` gets."""
  teachers = [params] * (learner.average is not None)
  if learner.frozen is not None:
    shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    teachers.append(jax.tree.map(shape_of, learner.frozen.model.params))
  return tuple(teachers) if len(teachers) > 1 else (teachers or [params])[0]


class _NoRows(collectives.Over):
  """In place of results over the whole batch, constants."""

  def sum(self, x):
    return jnp.zeros(x.shape[1:], x.dtype)

  def gather(self, x):
    return jnp.zeros((ROWS, *x.shape[1:]), x.dtype)

  def rows(self, number):
    return jnp.arange(number)


def _targets_fault(learner, teacher, batch, key, step) -> str | None:
  """Returns how targets depend on the rows of a device other than by `over`.

  What is the same for all rows must not depend on a device's rows, and what is
  by row only on that row.
  """
  memory = jax.eval_shape(lambda: dict(learner.memory or {}))

  def targets_of(batch, teacher, *args):
    return learner.targets(teacher, batch, *args, _NoRows())

  def by_row(teacher, batch, *args):
    total = jnp.zeros(())
    for x in jax.tree.leaves(targets_of(batch, teacher, *args).rows):
      mask = batch["mask"].reshape(-1, *(1,) * (x.ndim - 1))
      total += jnp.sum(x.astype(jnp.float32) * mask)
    return total, jnp.sum(batch["mask"], dtype=jnp.float32), {}

  def for_all(*args):
    targets = targets_of(*args)
    return targets.shared, targets.memory

  rest = key, step, memory
  jaxpr = jax.make_jaxpr(for_all)(batch, teacher, *rest).jaxpr
  reached = {id(x) for x in jaxpr.invars[: len(jax.tree.leaves(batch))]}
  for equation in jaxpr.eqns:
    if any(id(x) in reached for x in equation.invars):
      reached |= {id(x) for x in equation.outvars}
  if any(id(x) in reached for x in jaxpr.outvars):
    return (
      "whose targets compute memory, or what all rows share, from the rows of"
      " one device; expected over.mean, over.sum or over.gather, which take the"
      " rows of all devices."
    )
  if fault := mixed_rows(by_row, teacher, batch, *rest):
    how = fault.partition(", but ")[0].replace("a loss that", "targets that")
    return f"{how}; expected over.mean, over.sum or over.gather, or row by row."
  return None


def _targets(learner, teacher, batch, key, step) -> dict:
  """Returns the shapes of the targets in a batch."""
  memory = jax.eval_shape(lambda: dict(learner.memory or {}))

  def targets(*args):
    result = learner.targets(*args)
    return result.rows, result.shared

  rows, shared = _on_one_device(targets, teacher, batch, key, step, memory)
  parts = {"targets": rows, "shared": shared}
  return {name: tree for name, tree in parts.items() if tree is not None}


def _one_device() -> jax.sharding.Mesh:
  device = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  return jax.sharding.Mesh(device, sharding.AXES)

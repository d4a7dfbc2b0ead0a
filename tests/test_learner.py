"""The contract of the step: targets, teachers, memory, whole-batch losses.

self_supervised/test_methods.py has the methods on several devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from steps import MESH, ONE, placed

from vit_jax import step, step_checks
from vit_jax.batch import normalise
from vit_jax.models import build
from vit_jax.objectives.objective import Average, Learner, Objective, Targets
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Contrast(Objective):
  """InfoNCE of a network and its running mean, with a centre in memory."""

  kind: str = "contrast"
  whole_batch: bool = option(False, "the keys have a gradient; no teacher")

  SHARDING = ((r"head/bias", ("fsdp",)),)

  def make(self, model, run_shape, models):
    module = build(model, run_shape.num_classes)

    def vectors(params, batch, **options):
      images = normalise(batch["image"])
      _, out = module.apply({"params": params}, images, **options)
      x = out["pre_logits"].astype(jnp.float32)
      return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def targets(params, batch, rng, step, memory, over):
      keys = vectors(params, batch)
      new = 0.9 * memory["centre"] + 0.1 * over.mean(keys, batch["mask"])
      shared = {"keys": over.gather(keys - memory["centre"][None])}
      return Targets(over.rows(len(keys)), shared, {"centre": new})

    def loss(params, batch, rng, step, over=None):
      options = dict(records=batch["index"], rngs={"dropout": rng})
      x = vectors(params, batch, is_training=True, **options)
      mask = batch["mask"].astype(jnp.float32)
      if over is None:
        keys, places = batch["shared"]["keys"], batch["targets"]
      else:
        keys, places = over.gather(x + 0.1), over.rows(len(x))
      log_p = jax.nn.log_softmax(x @ keys.T * (1.0 + step))
      own = jnp.take_along_axis(log_p, places[:, None], 1)[:, 0]
      # Depends on x, else it would be counted on one device alone.
      number = jnp.sum(own * 0 + places.astype(jnp.float32))
      named = {"place": (number, jnp.float32(len(x)))}
      return -jnp.sum(own * mask), jnp.sum(mask), named

    if self.whole_batch:
      return Learner(module, loss, whole_batch=True)
    return Learner(
      module,
      loss,
      teacher=Average(lambda step: 0.75 + 0.0 * step, is_published=True),
      targets=targets,
      memory={"centre": np.zeros(32, np.float32)},
    )


def assembled(objective, devices=None, params=None, **changes):
  """Returns a trainer on a mesh, and the state before its first step.

  Args:
    objective: The objective.
    devices: Of the mesh; None: all.
    params: As of `placed`.
    **changes: As of `tiny.config`.
  """
  # Adam would divide gradients that are only rounding by their own size.
  config = tiny.config(optim__name="sgd", optim__lr=0.1, **changes)
  parts = tiny.Parts(config, devices)
  config = dataclasses.replace(config, objective=objective)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), config.total_steps)
  parts.trainer = step.assemble(config, shape, parts.mesh)
  parts.shapes = parts.trainer.state
  parts.train_step = parts.trainer.train_step
  return parts, placed(parts, params)


@pytest.mark.slow
@pytest.mark.parametrize("whole_batch", [False, True])
def test_a_mesh_has_the_losses_of_one_device(whole_batch):
  """Also in microbatches and a scan, where no row needs the gradient of all."""
  changes = {} if whole_batch else dict(optim__microbatch=2, model__scan=True)
  objective, outcomes, params = Contrast(whole_batch=whole_batch), [], None
  for devices, options in ((ONE, {}), (None, MESH | changes)):
    parts, start = assembled(objective, devices, params, **options)
    params = jax.device_get(start.params)
    state, metrics = parts.run(3, start)
    outcomes.append([metrics, jax.device_get(state.memory)])
  # float32, in another order of sums, in three steps
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
  jax.tree.map(close, *outcomes)


def test_a_skipped_step_keeps_teacher_and_memory():
  parts, start = assembled(Contrast(), ONE)
  state, (metrics,) = parts.run(1, start)
  # Named sums have counts of their own: of 16 rows, 15 count for the loss.
  assert metrics["skipped"] == 0 and metrics["place"] == (16 - 1) / 2
  assert state.eval_params is state.averages["ema"]
  kept = jax.device_get((state.averages, state.memory))
  assert all(x.any() for x in jax.tree.leaves(kept))
  nan = jax.tree.map(lambda x: x * np.nan, state.params["embedding"])
  state = state.replace(params={**state.params, "embedding": nan})
  state, (metrics,) = parts.run(1, state)
  assert metrics["skipped"] == 1
  after = (state.averages, state.memory)
  jax.tree.map(np.testing.assert_array_equal, kept, after)


def test_rules_of_the_objective_split_its_parameters():
  parts, _ = assembled(Contrast(), **MESH)
  for params in (parts.shapes.params, parts.shapes.averages["ema"]):
    assert params["head"]["bias"].sharding.spec == jax.P("fsdp")


@pytest.mark.parametrize(
  "whole_batch, changes, option",
  [
    (False, dict(optim__ema_decay=0.9), "config.optim.ema_decay"),
    (True, dict(optim__microbatch=8), "config.optim.microbatch"),
  ],
)
def test_options_that_the_contract_excludes(whole_batch, changes, option):
  """A published teacher is an average; microbatches have no whole batch."""
  objective = Contrast(whole_batch=whole_batch)
  config = dataclasses.replace(tiny.config(**changes), objective=objective)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = objective.make(config.model, shape, {})
  (error,) = step_checks.errors(config, shape, learner, ())
  assert option in error

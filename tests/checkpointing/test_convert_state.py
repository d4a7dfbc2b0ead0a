"""The state of a checkpoint whose optimizer has other parts."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import param_groups, sharding, step
from vit_jax.checkpointing import convert_state
from vit_jax.config import to_dict

RUN_SHAPE = step.RunShape(tiny.NUM_CLASSES, (16, 16), 20)
ALL = {
  "optim__clip_norm": 1.0,
  "optim__weight_decay": 0.1,
  "optim__ema_decay": 0.99,
}
NONE = {
  "optim__clip_norm": None,
  "optim__weight_decay": 0.0,
  "optim__ema_decay": None,
}


@pytest.mark.parametrize(
  "was, now",
  [
    (NONE, ALL),
    (ALL, NONE),
    (
      {**NONE, "optim__name": "sgd", "model__scan": True},
      {**ALL, "optim__name": "sgd", "optim__accumulator_dtype": "bfloat16"},
    ),
  ],
  ids=["on", "off", "also restacked and rounded"],
)
def test_the_moments_stay_and_an_average_begins_with_the_parameters(was, now):
  mesh = sharding.make_mesh(tiny.config().mesh, jax.devices()[:1])
  written, config = tiny.config(**was), tiny.config(**now)
  trainer = step.assemble(config, RUN_SHAPE, mesh)
  form_of = _form_of(config, trainer, mesh)
  like, convert = form_of({"config": to_dict(written)})
  assert jax.tree.structure(like) == jax.tree.structure(
    step.assemble(written, RUN_SHAPE, mesh).state
  )
  numbers = np.random.default_rng(0)
  before = jax.tree.map(
    lambda x: np.array(numbers.normal(size=x.shape), x.dtype), like
  )
  state = jax.tree.map(
    lambda x, to: jax.device_put(x.copy(), to.sharding), before, like
  )
  got = convert(state)
  # Two states may not fit: the old one is donated, unless it is restacked.
  is_restacked = written.model.scan != config.model.scan
  parts = jax.tree.leaves((state.params, state.opt_state))
  are_deleted = [x.is_deleted() for x in parts]
  assert are_deleted == [not is_restacked] * len(are_deleted)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(got) == shapes(trainer.state)
  if config.optim.ema_decay is None:
    assert not got.averages
  else:
    jax.tree.map(np.testing.assert_array_equal, got.averages["ema"], got.params)
  # The moments of every parameter, wherever they are in the state.
  moments, want = (_of_patches(s.opt_state) for s in (got, before))
  assert len(want) == len(moments) == (1 if config.optim.name == "sgd" else 2)
  for a, b in zip(moments, want, strict=True):
    np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype))


def _form_of(config, trainer, mesh):
  return convert_state.form_of(
    config, trainer, lambda other: step.assemble(other, RUN_SHAPE, mesh)
  )


def _of_patches(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = "/embedding/kernel"
  return [x for path, x in leaves if param_groups.path_of(path).endswith(name)]


def test_a_family_without_a_scan():
  """Its options have no such field."""
  mesh = sharding.make_mesh(tiny.config().mesh, jax.devices()[:1])
  was, now = (tiny.config(**parts, **tiny.RESNET) for parts in (NONE, ALL))
  old, new = (step.assemble(c, RUN_SHAPE, mesh) for c in (was, now))
  form_of = _form_of(now, new, mesh)
  like, _ = form_of({"config": to_dict(was)})
  assert jax.tree.structure(like) == jax.tree.structure(old.state)


def test_a_checkpoint_like_the_run_is_taken_as_it_is():
  mesh = sharding.make_mesh(tiny.config().mesh, jax.devices()[:1])
  config = tiny.config()
  trainer = step.assemble(config, RUN_SHAPE, mesh)
  form_of = _form_of(config, trainer, mesh)
  for written in ({"config": to_dict(config)}, {}, {"config": {"optim": 3}}):
    like, _ = form_of(written)
    assert like == trainer.state
  written = to_dict(config)
  written["optim"] |= {"clip_norm": 3.0}
  like, convert = form_of({"config": written})
  state = object()
  assert like == trainer.state and convert(state) is state

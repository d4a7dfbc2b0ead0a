"""The state of a checkpoint whose optimizer has other parts."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import param_groups, sharding, step
from vit_jax.checkpointing import convert_state
from vit_jax.config import to_dict

RUN_SHAPE = step.RunShape(tiny.NUM_CLASSES, (16, 16), 20)
MESH = sharding.make_mesh(tiny.config().mesh, jax.devices()[:1])
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
# Also restacked, and rounded.
STACKED = {**NONE, "optim__name": "sgd", "model__scan": True}
ROUNDED = {**ALL, "optim__name": "sgd", "optim__accumulator_dtype": "bfloat16"}


def _assembled(config):
  return step.assemble(config, RUN_SHAPE, MESH)


def _converted(config, metadata):
  """Returns the form of a checkpoint, that of the run, and the conversion."""
  trainer = _assembled(config)
  form_of = convert_state.form_of(config, trainer, _assembled)
  like, convert = form_of(metadata)
  return like, trainer.state, convert


def _moments(state):
  """Returns the moments of a parameter, wherever they are in the state."""
  leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
  name = "/embedding/kernel"
  return [x for path, x in leaves if param_groups.path_of(path).endswith(name)]


@pytest.mark.parametrize(
  "was, now", [(NONE, ALL), (ALL, NONE), (STACKED, ROUNDED)]
)
def test_the_moments_stay_and_an_average_begins_with_the_parameters(was, now):
  written, config = tiny.config(**was), tiny.config(**now)
  like, want, convert = _converted(config, {"config": to_dict(written)})
  assert jax.tree.structure(like) == jax.tree.structure(
    _assembled(written).state
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
  assert shapes(got) == shapes(want)
  if config.optim.ema_decay is None:
    assert not got.averages
  else:
    jax.tree.map(np.testing.assert_array_equal, got.averages["ema"], got.params)
  assert len(_moments(before)) == (1 if config.optim.name == "sgd" else 2)
  for a, b in zip(_moments(got), _moments(before), strict=True):
    np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype))


def test_a_family_without_a_scan():
  """Its options have no such field."""
  was, now = (tiny.config(**parts, **tiny.RESNET) for parts in (NONE, ALL))
  like, *_ = _converted(now, {"config": to_dict(was)})
  assert jax.tree.structure(like) == jax.tree.structure(_assembled(was).state)


def test_a_checkpoint_like_the_run_is_taken_as_it_is():
  config, state = tiny.config(), object()
  clipped = to_dict(config)
  clipped["optim"] |= {"clip_norm": 3.0}
  for written in ({"config": clipped}, {}, {"config": {"optim": 3}}):
    like, want, convert = _converted(config, written)
    assert like == want and convert(state) is state

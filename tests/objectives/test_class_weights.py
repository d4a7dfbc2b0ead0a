"""Balanced weights of classes in the loss: closed forms and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from self_supervised import methods

from vit_jax import run_checks, step
from vit_jax.batch import LabelStatistics
from vit_jax.config import ConfigError
from vit_jax.models import build
from vit_jax.objectives import Classification

COUNTS = (6, 2, 0)  # 8 images of 2 classes; the third has none
WEIGHTS = np.array([8 / (2 * 6), 8 / (2 * 2), 0.0])
LABELS = np.array([0, 0, 1, 0])
MASK = np.array([True, True, True, False])
# The head's kernel is zero: all images have the logits of its bias.
BIAS = jnp.array([0.5, -1.0, 2.0])
LOG_P = np.asarray(jax.nn.log_softmax(BIAS), np.float64)
OWN = -(WEIGHTS[LABELS] * LOG_P[LABELS])
CASES = {
  "plain": {},
  "smoothed": dict(label_smoothing=0.3),
  "mixed": dict(mixup=1.0),
  "unknown": {},  # as for the planner, which reads no labels
}


@pytest.fixture(scope="module")
def losses():
  """Name of a case -> sum and count of its loss."""
  model = methods.config("mixing").model
  images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3))
  batch = {
    "image": jnp.asarray(images, jnp.uint8),
    "label": jnp.asarray(LABELS),
    "mask": jnp.asarray(MASK),
    "index": jnp.arange(4),
  }

  def loss(name, params, batch):
    counts = None if name == "unknown" else COUNTS
    labels = lambda: LabelStatistics(class_counts=counts)
    objective = Classification(class_weights="balanced", **CASES[name])
    shape = step.RunShape(3, (16, 16), 1, labels=labels)
    learner = objective.make(model, shape, {})
    batch = objective.paired(batch)
    return learner.loss(params, batch, jax.random.key(1), 0)[:2]

  params = methods.params_of(build(model, 3))
  params["head"] = {"kernel": jnp.zeros((32, 3)), "bias": BIAS}
  compute = tiny.in_step(
    lambda *args: {name: loss(name, *args) for name in CASES}
  )
  return jax.device_get(compute(params, batch))


def test_the_mean_over_images_in_closed_form(losses):
  loss, count = losses["plain"]
  # A few operations in float32.
  assert loss == pytest.approx(OWN[:3].sum(), rel=1e-6)
  assert count == 3  # of images, not of weights
  log_p = jnp.broadcast_to(jnp.asarray(LOG_P, "float32"), (3, 3))
  one_hot = jax.nn.one_hot(LABELS[:3], 3)
  again = optax.losses.softmax_cross_entropy(log_p, one_hot * WEIGHTS[None])
  assert loss == pytest.approx(float(again.sum()), rel=1e-6)


def test_smoothed_targets_have_the_weights_of_their_classes(losses):
  targets = 0.7 * np.eye(3)[LABELS[:3]] + 0.1
  want = -(targets * WEIGHTS * LOG_P).sum()
  assert losses["smoothed"][0] == pytest.approx(want, rel=1e-6)


def test_mixed_targets_have_the_weights_of_their_classes(losses):
  """A row's share a is the same for all rows; the first has no partner."""
  # loss = own_0 + a (own_1 + own_2) + (1 - a) (own_0 + own_1)
  loss = losses["mixed"][0]
  a = (loss - OWN[0] - OWN[0] - OWN[1]) / (OWN[2] - OWN[0])
  assert 0.5 <= a <= 1


def test_counts_that_are_unknown_weigh_nothing(losses):
  want = -LOG_P[LABELS[:3]].sum()
  assert losses["unknown"][0] == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
def test_a_run_counts_its_training_split():
  config = tiny.config(
    objective__class_weights="balanced",
    data__dataset="digits",
    data__split="train[:100]",
  )
  run = run_checks.setup(config)
  counts = run.class_counts
  labels = run.data.source.labels()
  assert counts == tuple(np.bincount(labels, minlength=10))
  assert sum(counts) == 100 and run.run_shape.labels().class_counts == counts


def test_what_is_refused():
  """Losses of independent classes, and a loader, whose labels are unknown."""
  for loss in ("sigmoid", "bce"):
    (error,) = Classification(class_weights="balanced", loss=loss).errors()
    assert "class_weights" in error
  config = tiny.config(objective__class_weights="balanced")
  with pytest.raises(ConfigError, match="class_weights.*Data"):
    run_checks.setup(config, data=tiny.Data())

"""Balanced weights of classes in the loss: closed forms and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from vit_jax import run_checks, step
from vit_jax.batch import LabelStatistics
from vit_jax.config import ConfigError
from vit_jax.objectives import Classification

COUNTS = (6, 2, 0)  # 8 images of 2 classes; the third has none
WEIGHTS = np.array([8 / (2 * 6), 8 / (2 * 2), 0.0])
MODEL = tiny.config().model
LABELS = np.array([0, 0, 1, 0])
MASK = np.array([True, True, True, False])


def _loss(counts=COUNTS, **options):
  objective = Classification(class_weights="balanced", **options)
  shape = step.RunShape(
    3, (16, 16), 1, labels=lambda: LabelStatistics(class_counts=counts)
  )
  learner = objective.make(MODEL, shape, {})
  images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3))
  batch = objective.paired(
    {
      "image": jnp.asarray(images, jnp.uint8),
      "label": jnp.asarray(LABELS),
      "mask": jnp.asarray(MASK),
      "index": jnp.arange(4),
    }
  )
  x = jnp.asarray(images / 127.5 - 1, jnp.float32)
  params = jax.jit(learner.module.init)(jax.random.key(0), x)["params"]
  head = params["head"] | {"bias": jnp.array([0.5, -1.0, 2.0])}
  rng = jax.random.key(1)
  loss = tiny.in_step(lambda p: learner.loss(p, batch, rng, 0))
  return loss(params | {"head": head})


# The head's kernel is zero: all images have the logits of its bias.
LOG_P = np.asarray(jax.nn.log_softmax(jnp.array([0.5, -1.0, 2.0])), np.float64)


def test_the_mean_over_images_in_closed_form():
  loss, count, _ = _loss()
  want = -(WEIGHTS[LABELS] * LOG_P[LABELS])[:3].sum()
  # A few operations in float32.
  assert float(loss) == pytest.approx(want, rel=1e-6)
  assert count == 3  # of images, not of weights
  log_p = jnp.broadcast_to(jnp.asarray(LOG_P, "float32"), (3, 3))
  one_hot = jax.nn.one_hot(LABELS[:3], 3)
  again = optax.losses.softmax_cross_entropy(log_p, one_hot * WEIGHTS[None])
  assert float(loss) == pytest.approx(float(again.sum()), rel=1e-6)


@pytest.mark.slow
def test_smoothed_targets_have_the_weights_of_their_classes():
  loss, _, _ = _loss(label_smoothing=0.3)
  targets = 0.7 * np.eye(3)[LABELS[:3]] + 0.1
  want = -(targets * WEIGHTS * LOG_P).sum()
  assert float(loss) == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
def test_mixed_targets_have_the_weights_of_their_classes():
  """A row's share a is the same for all rows; the first has no partner."""
  loss, _, _ = _loss(mixup=1.0)
  own = -(WEIGHTS[LABELS] * LOG_P[LABELS])
  # loss = own_0 + a (own_1 + own_2) + (1 - a) (own_0 + own_1)
  a = (float(loss) - own[0] - own[0] - own[1]) / (own[2] - own[0])
  assert 0.5 <= a <= 1


@pytest.mark.slow
def test_counts_that_are_unknown_weigh_nothing():
  """As for the planner, which reads no labels."""
  loss, _, _ = _loss(counts=None)
  assert float(loss) == pytest.approx(-LOG_P[LABELS[:3]].sum(), rel=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "bce"])
def test_sigmoids_are_refused(loss):
  (error,) = Classification(class_weights="balanced", loss=loss).errors()
  assert error.startswith("config.objective.class_weights: got 'balanced'")


def test_a_loader_is_refused():
  config = tiny.config(objective__class_weights="balanced")
  with pytest.raises(ConfigError, match="class_weights: got 'balanced'.*Data"):
    run_checks.setup(config, data=tiny.Data())


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

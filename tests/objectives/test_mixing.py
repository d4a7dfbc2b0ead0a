"""Mixup, cutmix and weights of classes: formulas, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from self_supervised import methods

from vit_jax import losses as losses_lib
from vit_jax import run_checks
from vit_jax.batch import LabelStatistics, normalise
from vit_jax.config import ConfigError
from vit_jax.config.checks import errors
from vit_jax.models import build
from vit_jax.objectives import Classification, mixing
from vit_jax.step import RunShape

KEYS = [jax.random.key(i) for i in range(200)]


@functools.cache
def mixed(alpha, box):
  """Mixes black rows of class 0 with white ones of class 1, for each key.

  The last row has no partner, and stays as it is.
  """
  black = jnp.zeros((3, 12, 10, 3)), jnp.eye(2)[jnp.zeros(3, int)]
  white = jnp.ones((3, 12, 10, 3)), jnp.eye(2)[jnp.ones(3, int)]
  there = jnp.array([True, True, False])
  mix = jax.jit(lambda k: mixing.mix(*black, white, there, k, alpha, box))
  images, targets = jax.vmap(mix)(jnp.stack(KEYS))
  assert not images[:, 2].any() and (targets[:, 2, 0] == 1).all()
  return np.asarray(images[:, :2]), np.asarray(targets[:, :2])


def test_mixup_is_one_share_a_step_of_at_least_a_half():
  images, targets = mixed(0.2, 0.0)
  share = images[:, :1, :1, :1, :1]  # of the white partner
  np.testing.assert_array_equal(images, np.broadcast_to(share, images.shape))
  share = share[:, 0, 0, 0, 0]
  # The share of the targets is a mean of 120 equal float32 near 1.
  want = share[:, None] * [[1, 1]]
  np.testing.assert_allclose(targets[:, :, 1], want, 0, 1e-6)
  np.testing.assert_allclose(targets.sum(-1), 1, atol=2e-7)
  assert share.min() >= 0 and 0.4 < share.max() <= 0.5
  # E[min(b, 1 - b)] of Beta(0.2, 0.2) is 0.1129 by numerical integration, the
  # deviation of a draw 0.157: four deviations of the mean of 200.
  assert abs(share.mean() - 0.1129) < 0.045


def test_cutmix_is_a_box_and_its_exact_share():
  images, targets = mixed(0.0, 1.0)
  sizes = set()
  for image, target in zip(images[:, 0], targets[:, 0], strict=True):
    inside = image[..., 0] == 1
    assert set(np.unique(image)) <= {0, 1}
    rows, columns = inside.any(1), inside.any(0)
    assert inside.sum() == rows.sum() * columns.sum()  # a filled rectangle
    np.testing.assert_allclose(target[1], inside.mean(), atol=1e-6)
    sizes.add((rows.sum(), columns.sum()))
  assert len(sizes) > 20
  # Before clipping, its area is 1 - b, and b of Beta(1, 1) has the mean 1/2; a
  # third is cut off. The bounds are wide for 200 draws with deviation 0.25.
  assert 0.22 < targets[:, 0, 1].mean() < 0.42


LOSSES = {
  "softmax": dict(label_smoothing=0.2),
  "binary": dict(loss="bce", binary_targets=True),
}


def test_the_loss_is_that_of_the_mixed_rows():
  """Written out with big_vision's formula; a masked row is no partner."""
  made = methods.config("mixing")
  batch, rng = methods.batch(1, made), jax.random.key(3)
  assert tiny.config().objective.paired(batch) is batch  # both are off
  shape = RunShape(tiny.NUM_CLASSES, (16, 16))
  objectives = {k: Classification(mixup=0.4, **v) for k, v in LOSSES.items()}
  learners = {k: v.make(made.model, shape, {}) for k, v in objectives.items()}
  module = learners["softmax"].module
  a = jax.random.split(jax.random.fold_in(rng, 2), 5)[1]
  a = float(jax.random.beta(a, 0.4, 0.4))
  # A partner is the row before.
  a = np.where(np.roll(batch["mask"], 1), max(a, 1 - a), 1.0)

  def mix(x):
    return (a * x.T + (1 - a) * np.roll(x, 1, 0).T).T

  images = jnp.float32(mix(normalise(batch["image"])))

  @tiny.in_step
  def computed(params, batch):
    paired = objectives["softmax"].paired(batch)
    losses = {
      k: v.loss(params, paired, rng, 0)[:2] for k, v in learners.items()
    }
    return losses, module.apply({"params": params}, images)[0]

  losses, logits = computed(methods.params_of(module), batch)
  one_hot = np.eye(10)[batch["label"]]
  targets = mix(0.8 * one_hot + 0.02)
  for name, options in LOSSES.items():
    if name == "binary":  # both classes are whole, as in DeiT III
      targets = mix(one_hot) > 0
    loss = losses_lib.LOSSES[options.get("loss", "softmax")]
    want = loss(logits, jnp.asarray(targets, jnp.float32))[batch["mask"]]
    total, count = losses[name]
    # Sums of 6 terms in another order.
    np.testing.assert_allclose(total / count, want.mean(), rtol=2e-6)


# Balanced weights of classes.

COUNTS = (6, 2, 0)  # 8 images of 2 classes; the third has none
WEIGHTS = np.array([8 / (2 * 6), 8 / (2 * 2), 0.0])
LABELS = np.array([0, 0, 1, 0])
MASK = np.array([True, True, True, False])
CASES = {
  "plain": {},
  "smoothed": dict(label_smoothing=0.3),
  "mixed": dict(mixup=1.0),
  "unknown": {},  # as for the planner, which reads no labels
}


def test_losses_with_weights_of_classes():
  """The mean over images of each target's share, weighted by its class."""
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
    learner = objective.make(model, RunShape(3, (16, 16), 1, labels=labels), {})
    batch = objective.paired(batch)
    return learner.loss(params, batch, jax.random.key(1), 0)[:2]

  params = methods.params_of(build(model, 3))
  # The head's kernel is zero: all images have the logits of its bias.
  bias = jnp.array([0.5, -1.0, 2.0])
  params["head"] = {"kernel": jnp.zeros((32, 3)), "bias": bias}
  compute = tiny.in_step(
    lambda *args: {name: loss(name, *args) for name in CASES}
  )
  losses = jax.device_get(compute(params, batch))
  assert all(count == 3 for _, count in losses.values())  # images, not weights
  got = {name: loss for name, (loss, _) in losses.items()}
  log_p = np.asarray(jax.nn.log_softmax(bias), np.float64)
  own = -(WEIGHTS * log_p)[LABELS]
  targets = 0.7 * np.eye(3)[LABELS[:3]] + 0.1
  # A few operations in float32.
  assert got["plain"] == pytest.approx(own[:3].sum(), rel=1e-6)
  assert got["unknown"] == pytest.approx(-log_p[LABELS[:3]].sum(), rel=1e-6)
  want = -(targets * WEIGHTS * log_p).sum()
  assert got["smoothed"] == pytest.approx(want, rel=1e-6)
  # The share a is the same for all rows; the first has no partner:
  # loss = own_0 + a (own_1 + own_2) + (1 - a) (own_0 + own_1)
  a = (got["mixed"] - own[0] - own[0] - own[1]) / (own[2] - own[0])
  assert 0.5 <= a <= 1


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


def test_options_that_are_wrong():
  """Also weights of independent classes, and of a loader's unknown labels."""
  wrong = dict(mixup=-0.1, cutmix=-1.0, binary_targets=True)
  made = tiny.config(**{f"objective__{k}": v for k, v in wrong.items()})
  assert {x.split(":")[0] for x in errors(made)} == {
    f"config.objective.{k}" for k in wrong
  }
  for loss in ("sigmoid", "bce"):
    (error,) = Classification(class_weights="balanced", loss=loss).errors()
    assert "class_weights" in error
  config = tiny.config(objective__class_weights="balanced")
  with pytest.raises(ConfigError, match="class_weights.*Data"):
    run_checks.setup(config, data=tiny.Data())

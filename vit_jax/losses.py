"""Cross-entropies, one value per example; the caller takes the mean."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


def targets_of(
  labels: Int[Array, " b"] | Float[Array, "b classes"], num_classes: int
) -> Float[Array, "b classes"]:
  """Turns the labels of a batch into targets, one weight per class.

  Integers become one-hot rows. Rows that already have a weight per class do not
  change. A negative label (padding) becomes a row of zeros. Its softmax loss is
  0, but the mask of the batch must still exclude it from the mean.

  Raises:
    ValueError: The rows are not `num_classes` wide.

  Example:
    >>> targets_of(jnp.array([2, 0]), 3).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
  """
  if labels.ndim == 1:
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
  if labels.shape[-1] != num_classes:
    raise ValueError(
      f"labels: got rows of {labels.shape[-1]} classes, expected"
      f" {num_classes}, the width of the head. Set config.num_classes to"
      f" {labels.shape[-1]} or leave it unset."
    )
  return labels.astype(jnp.float32)


def smooth(
  targets: Float[Array, "*b classes"], amount: float
) -> Float[Array, "*b classes"]:
  """Label smoothing: spreads a share of the target evenly over all classes.

  targets_k -> (1 - amount) targets_k + amount / classes

  Softmax and sigmoid losses use the same rule, as in scenic and timm. For the
  sigmoid, a target of 1 becomes 1 - amount + amount / classes, and a target of
  0 becomes amount / classes: with many classes and an amount of 0.1, the
  negative targets hardly change. (Other recipes give on/off values: off = 1e-4
  with 1000 classes is about an amount of 0.1 here, but keeps 1 - 1e-4 for the
  true class.)

  Args:
    targets: One-hot or mixed one-hot rows.
    amount: Share of the target, 0 to 1; 0 changes nothing.

  Raises:
    ValueError: The amount is not between 0 and 1.

  Source: arXiv:1512.00567, section 7.

  Example:
    >>> smooth(jnp.array([[0.0, 1.0, 0.0, 0.0]]), 0.5).tolist()
    [[0.125, 0.625, 0.125, 0.125]]
  """
  if not 0.0 <= amount <= 1.0:
    raise ValueError(
      f"config.objective.label_smoothing: got {amount}, expected a share"
      " from 0 to 1."
    )
  return (1.0 - amount) * targets + amount / targets.shape[-1]


def softmax_xent(
  logits: Float[Array, "*b classes"], targets: Float[Array, "*b classes"]
) -> Float[Array, "*b"]:
  """Cross-entropy of a softmax against the targets, in nats.

  loss = -sum_k targets_k log softmax(logits)_k, computed in float32.

  Args:
    logits: Unnormalised log-probabilities, any float type.
    targets: A distribution over the classes; rows sum to 1 (not checked).

  Example:
    >>> round(float(softmax_xent(jnp.zeros((1, 4)), jnp.eye(4)[:1])[0]), 4)
    1.3863
  """
  log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -jnp.sum(targets.astype(jnp.float32) * log_p, axis=-1)


def sigmoid_xent(
  logits: Float[Array, "*b classes"], targets: Float[Array, "*b classes"]
) -> Float[Array, "*b"]:
  """Binary cross-entropy of each class, summed over the classes, in nats.

  loss = -sum_k (t_k log sigmoid(x_k) + (1 - t_k) log sigmoid(-x_k)), computed
  in float32. The sum is not divided by the number of classes: the learning
  rates of the published recipes expect the sum. So does a head bias of -10,
  with which the loss of an untrained head is about 10.

  Args:
    logits: Log-odds of each class, any float type.
    targets: Probability of each class, 0 to 1; rows need not sum to 1.

  Source: arXiv:2006.07159; for the sum, google-research/vision_transformer#34.

  Example:
    >>> round(float(sigmoid_xent(jnp.zeros((1, 4)), jnp.eye(4)[:1])[0]), 4)
    2.7726
  """
  logits = logits.astype(jnp.float32)
  targets = targets.astype(jnp.float32)
  # log sigmoid(-x) is taken as such: 1 - sigmoid(x) would lose all digits of
  # a confident negative.
  log_p = jax.nn.log_sigmoid(logits)
  log_not_p = jax.nn.log_sigmoid(-logits)
  return -jnp.sum(targets * log_p + (1.0 - targets) * log_not_p, axis=-1)


def binary_xent(
  logits: Float[Array, "*b classes"], targets: Float[Array, "*b classes"]
) -> Float[Array, "*b"]:
  """Binary cross-entropy of each class, averaged over the classes, in nats.

  This is `sigmoid_xent` divided by the number of classes, as in PyTorch and
  timm. That factor does not change Adam's updates, but it changes the norm to
  which gradients are clipped. Targets are used as they are; with
  config.objective.binary_targets, those above 0 become 1.

  Source: arXiv:2110.00476, section 3; arXiv:2204.07118, section 3.

  Example:
    >>> round(float(binary_xent(jnp.zeros((1, 4)), jnp.eye(4)[:1])[0]), 4)
    0.6931
  """
  return sigmoid_xent(logits, targets) / logits.shape[-1]


def balanced_weights(
  counts: Sequence[int], num_classes: int
) -> Float32[np.ndarray, " classes"]:
  """Returns a weight for each class, so that all classes count the same.

  w_c = n / (C n_c), where n_c of the n images have class c, and C classes have
  an image. The mean weight of the images is 1. A class without an image gets 0.

  Args:
    counts: Images of each class.
    num_classes: Width of the head, at least the number of counts.

  Source: scikit-learn's `class_weight="balanced"`.

  Example:
    >>> balanced_weights([30, 10, 0], 4).tolist()
    [0.6666666865348816, 2.0, 0.0, 0.0]
  """
  n = np.zeros(num_classes)
  n[: len(counts)] = counts
  present = n > 0
  weights = np.zeros(num_classes, np.float32)
  weights[present] = n.sum() / (present.sum() * n[present])
  return weights


LOSSES = {"softmax": softmax_xent, "sigmoid": sigmoid_xent, "bce": binary_xent}

REGRESSION = "regression"  # of a head whose outputs are numbers, not logits
# What a model's metadata state as the loss of its head.
HEADS = (*LOSSES, REGRESSION)

# What the logits of a head mean, by the loss of its training: probabilities
# that sum to 1 over the classes, or an independent one for each class.
PROBABILITIES = {
  "softmax": jax.nn.softmax,
  "sigmoid": jax.nn.sigmoid,
  "bce": jax.nn.sigmoid,
}

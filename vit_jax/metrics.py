"""Counts correct predictions, with padding excluded exactly.

Means are kept as (sum, count) until the end, so that batches of different
numbers of real examples, and devices, add up without weights.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def top_k_correct(
  logits: Float[Array, "b classes"],
  labels: Int[Array, " b"] | Shaped[Array, "b classes"],
  k: int,
) -> Bool[Array, " b"]:
  """Returns whether one of the k largest logits is that of a label.

  Among equal logits the lower class comes first, so the result never depends on
  the order of the examples or on the device; a head of zeros predicts class 0,
  not every class. A row with NaN is never right.

  Args:
    logits: Any float type.
    labels: The class, where -1 is never predicted; or a row per example with a
      positive entry for each class that counts as right. A row without any is
      always wrong: an evaluation that skips such examples, like ImageNet
      ReaL's, masks them with `labels.max(-1) > 0`.
    k: 1 or more; k at least the number of classes makes every labelled example
      right.

  Example:
    >>> logits = jnp.array([[0.1, 0.7, 0.2], [0.4, 0.4, 0.2]])
    >>> top_k_correct(logits, jnp.array([2, 1]), k=1).tolist()
    [False, False]
    >>> top_k_correct(logits, jnp.array([2, 1]), k=2).tolist()
    [True, True]
  """
  num_classes = logits.shape[-1]
  _, classes = jax.lax.top_k(logits, min(k, num_classes))  # b k
  if labels.ndim == 1:
    is_hit = classes == labels[:, None]
  else:
    is_hit = jnp.take_along_axis(labels, classes, axis=-1) > 0
  is_number = ~jnp.isnan(logits).any(axis=-1)
  return is_hit.any(axis=-1) & is_number


def sum_and_count(
  values: Shaped[Array, " b"], mask: Bool[Array, " b"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the sum of the values that count, and their number, in float32.

  Masked values are replaced, not multiplied by 0, so that a NaN in padding does
  not reach the sum.

  Example:
    >>> values = jnp.array([1.0, 3.0, jnp.nan])
    >>> total, count = sum_and_count(values, jnp.array([True, True, False]))
    >>> float(total), float(count)
    (4.0, 2.0)
  """
  values = jnp.where(mask, values.astype(jnp.float32), 0.0)
  return values.sum(), mask.astype(jnp.float32).sum()


def mean(parts: Iterable[tuple]) -> float:
  """Returns the mean of all batches from their (sum, count), added in float64.

  Returns:
    NaN if nothing counted.

  Example:
    >>> mean([(3.0, 4), (1.0, 1)])
    0.8
  """
  total, count = 0.0, 0.0
  for part, number in parts:
    total += float(part)
    count += float(number)
  return total / count if count else float("nan")

"""What a student learns of a teacher's scores: centring, or Sinkhorn-Knopp.

The scores of a teacher would become the same for all images, or equal for all
prototypes. Centring and Sinkhorn-Knopp prevent it. Both are over the whole
batch: the results are those of one device on any mesh, up to rounding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CENTRE_MOMENTUM = 0.9  # of the running mean of scores
ITERATIONS = 3  # of Sinkhorn-Knopp


def sharpened(
  scores: Float[Array, "... k"],
  temperature: Float[Array, ""] | float,
  centre: Float[Array, " k"] | None = None,
) -> Float[Array, "... k"]:
  """Returns softmax((scores - centre) / temperature), float32.

  Args:
    scores: The teacher's scores of k prototypes.
    temperature: More than 0; small ones make the result nearly one-hot.
    centre: Mean of the scores; None for 0.

  Source: arXiv:2104.14294, section 3.1.
  """
  if centre is not None:
    scores = scores - jnp.expand_dims(centre, range(scores.ndim - 1))
  return jax.nn.softmax(scores / temperature)


def moved_centre(
  centre: Float[Array, " k"],
  scores: Float[Array, "n k"],
  weights: Float[Array, " n"],
  over,
) -> Float[Array, " k"]:
  """Returns 0.9 centre + 0.1 mean of the scores over the whole batch.

  Args:
    centre: Centre of the step.
    scores: The teacher's scores of the rows of this device.
    weights: 1 for rows that count, 0 for others.
    over: Sums over all devices, see `collectives.Over`.
  """
  mean = over.mean(scores, weights)
  return CENTRE_MOMENTUM * centre + (1 - CENTRE_MOMENTUM) * mean


def sinkhorn(
  scores: Float[Array, "n k"],
  temperature: Float[Array, ""] | float,
  weights: Float[Array, " n"],
  over,
) -> Float[Array, "n k"]:
  """Returns targets that use all prototypes alike in the whole batch.

  From Q = exp(scores / temperature), three times: each prototype's sum over the
  rows becomes 1 / k, then each row's sum over the prototypes becomes 1 / rows.
  The result is Q times the number of rows, so that each row has the sum 1.

  Sums are of exponents minus their largest value, so that none overflows: Q is
  exp(scores / temperature + prototype's number + row's number), of which only
  the logarithms are kept. The constants cancel.

  Args:
    scores: The teacher's scores of the rows of this device.
    temperature: More than 0.
    weights: 1 for rows that count, 0 for others, such as places without a
      masked patch. Those get a result, too, which nothing depends on.
    over: Sums over all devices, see `collectives.Over`.

  Source: arXiv:2006.09882, section 3.1; arXiv:2304.07193, section 4.
  """
  x = scores.astype(jnp.float32) / temperature
  counts = (weights > 0)[:, None]
  # The devices' largest values; there is no collective for a maximum.
  largest = jnp.max(jnp.where(counts, x, -jnp.inf), axis=0)
  largest = jnp.maximum(over.gather(largest[None]).max(0), -1e30)[None]

  def log_sum(x):
    """Log of the sum over all rows, of exponentials that are at most 1."""
    total = over.sum(jnp.where(counts, jnp.exp(x), 0.0))
    return jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny))[None]

  of_prototypes = -largest - log_sum(x - largest)
  for _ in range(ITERATIONS - 1):
    log_q = jax.nn.log_softmax(x + of_prototypes)
    of_prototypes = of_prototypes - log_sum(log_q)
  return jax.nn.softmax(x + of_prototypes)


def loss_of_crops(
  targets: Float[Array, "b 2 k"],
  large: Float[Array, "b 2 k"],
  small: Float[Array, "b n k"] | None,
  temperature: float,
) -> Float[Array, " b"]:
  """Returns the mean cross-entropy over the pairs of different crops.

  A large crop learns the targets of the other one, a small crop those of both:
  2 + 2 n pairs.

  Args:
    targets: Of the two large crops.
    large: The student's scores of the same two crops.
    small: The student's scores of the n small crops; None for no such crops.
    temperature: The student's.

  Source: arXiv:2104.14294, equation 3. With two large crops, the weights of
    DINOv2's global and local terms give the same mean.
  """
  # Sums of products in float32; a matrix product would round them.
  log_q = jax.nn.log_softmax(large / temperature)
  total, pairs = jnp.sum(targets[:, ::-1] * log_q, (1, 2)), 2
  if small is not None:
    log_q = jax.nn.log_softmax(small / temperature)
    total += jnp.sum(targets.sum(1) * log_q.sum(1), 1)
    pairs += 2 * small.shape[1]
  return -total / pairs


def entropy(probabilities: Float[Array, "... k"]) -> Float[Array, "..."]:
  """Returns -sum p log p along the last dimension, in nats.

  Example:
    >>> entropy(jnp.array([0.5, 0.5, 0.0])).round(4)
    Array(0.6931, dtype=float32)
  """
  return jax.scipy.special.entr(probabilities).sum(-1)

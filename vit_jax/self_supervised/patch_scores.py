"""Scores of many patches for many prototypes, never all of them at once.

A patch has a score, an inner product, for each prototype: 65,536 or more. So
the patches' vectors are kept, and their scores are computed when they are used,
of a part of the patches at a time, and again in the backward pass. The targets
of a patch are softmax(scores / temperature + offsets): both centring and
Sinkhorn-Knopp give the same offsets to all patches of a batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.self_supervised.targets import ITERATIONS

MOST_SCORES = 2**26  # of a part: 256 MiB in float32


def scores(
  vectors: Float[Array, "*b d"],
  prototypes: Float[Array, "d k"],
  dtype: DTypeLike,
) -> Float[Array, "*b k"]:
  """Returns inner products, float32, of factors of a type."""
  return jnp.matmul(
    vectors.astype(dtype),
    prototypes.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def cross_entropies(
  student: tuple[Float[Array, "b n d"], Float[Array, "d k"], float],
  teacher: tuple[Float[Array, "b n e"], Float[Array, "e k"], Any],
  offsets: Float[Array, " k"],
  weights: Float[Array, "b n"],
  dtype: DTypeLike = "float32",
) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
  """Returns weighted sums over patches: cross-entropies, entropies of targets.

  Args:
    student, teacher: Vectors of the same patches, prototypes, temperature.
      Prototypes are float32, as is the sum of their gradients over the parts.
    offsets: See `sinkhorn_offsets`.
    weights: Weights of the patches.
    dtype: Type of the factors of scores.
  """

  @jax.checkpoint
  def of_part(student_vectors, prototypes, teacher_vectors, part):
    z = scores(teacher_vectors, teacher[1], dtype) / teacher[2]
    z = z + offsets[None, None]
    log_p = jax.nn.log_softmax(z)
    p = jnp.exp(log_p)
    log_q = jax.nn.log_softmax(
      scores(student_vectors, prototypes, dtype) / student[2]
    )
    both = -jnp.sum(p * log_q, -1), -jnp.sum(p * log_p, -1)
    return [jnp.sum(x * part, 1) for x in both]

  def add(sums, parts):
    student_vectors, teacher_vectors, part = parts
    new = of_part(student_vectors, student[1], teacher_vectors, part)
    return jax.tree.map(jnp.add, sums, new), None

  parts = _parts((student[0], teacher[0], weights), student[1].shape[1])
  zeros = jnp.zeros(len(weights))
  (losses, entropies), _ = jax.lax.scan(add, [zeros, zeros], parts)
  return losses, entropies


def mean_scores(
  vectors: Float[Array, "b n d"],
  prototypes: Float[Array, "d k"],
  counts: Float[Array, "b n"],
  over,
) -> Float[Array, " k"]:
  """Returns the mean of the scores over the patches of the whole batch.

  Args:
    vectors: The teacher's, of the patches of this device.
    prototypes: The teacher's.
    counts: 1 for patches that count, 0 for others.
    over: Sums over all devices, see `collectives.Over`.
  """
  flat = vectors.reshape(-1, vectors.shape[-1])
  mean = over.mean(flat, counts.reshape(-1))
  return jnp.matmul(mean, prototypes, precision="highest")


def sinkhorn_offsets(
  vectors: Float[Array, "b n d"],
  prototypes: Float[Array, "d k"],
  temperature: Float[Array, ""] | float,
  counts: Float[Array, "b n"],
  over,
  dtype: DTypeLike = "float32",
) -> Float[Array, " k"]:
  """Returns offsets with which targets use all prototypes alike.

  The targets are those of `targets.sinkhorn`, whose last step divides each
  patch's by their sum, as a softmax does.

  Args:
    vectors: The teacher's, of the patches of this device.
    prototypes: The teacher's.
    temperature: More than 0.
    counts: 1 for patches that count, 0 for others.
    over: Sums over all devices, see `collectives.Over`.
    dtype: Type of the factors of scores.
  """
  parts = _parts((vectors, counts), prototypes.shape[1])

  def log_sums(log_q: Callable[[Array], Array]) -> Float[Array, " k"]:
    """Logs of the prototypes' sums over all patches, of exp(log_q) <= 1."""

    def add(sums, part):
      q = jnp.exp(log_q(scores(part[0], prototypes, dtype) / temperature))
      return sums + jnp.sum(q * part[1][..., None], (0, 1)), None

    sums, _ = jax.lax.scan(add, jnp.zeros(prototypes.shape[1]), parts)
    total = over.sum(sums[None])
    return jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny))

  # Vectors have the norm 1, so that scores are at most a prototype's norm. (A
  # little more, as the factors of the products can be bfloat16.)
  norms = jnp.linalg.norm(prototypes, axis=0)
  largest = 1.01 * norms / temperature
  offsets = -largest - log_sums(lambda z: z - largest[None, None])
  for _ in range(ITERATIONS - 1):
    with_offsets = functools.partial(jnp.add, offsets[None, None])
    offsets -= log_sums(lambda z, add=with_offsets: jax.nn.log_softmax(add(z)))
  return offsets


def _parts(arrays: Any, num_prototypes: int) -> Any:
  """Divides the second dimension into parts, which become the first one.

  The last part is filled up with zeros, also for weights.
  """
  rows, places = jax.tree.leaves(arrays)[0].shape[:2]
  number = math.ceil(rows * places * num_prototypes / MOST_SCORES)
  number = min(max(number, 1), places)
  size = math.ceil(places / number)
  number = math.ceil(places / size)

  def divided(x):
    missing = number * size - places
    x = jnp.pad(x, ((0, 0), (0, missing), *(x.ndim - 2) * [(0, 0)]))
    return jnp.moveaxis(x.reshape(rows, number, size, *x.shape[2:]), 1, 0)

  return jax.tree.map(divided, arrays)

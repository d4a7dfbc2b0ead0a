"""Gram anchoring: similarities between patches stay those of a frozen model.

Source: arXiv:2508.10104, section 4; dinov3,
  configs/train/dinov3_vit7b16_gram_anchor.yaml.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.resample import METHODS


def losses(
  student: Float[Array, "b n d"], teacher: Float[Array, "b n e"]
) -> Float[Array, " b"]:
  """Returns the mean squared difference of two images' Gram matrices.

  A Gram matrix has the inner products of all pairs of an image's patches, after
  each patch has length 1. Negative ones count, as in the published recipes.

  Args:
    student, teacher: Features of the same patches; float32.
  """
  difference = _gram(student) - _gram(teacher)
  return jnp.square(difference).mean((1, 2))


def _gram(x: Float[Array, "b n d"]) -> Float[Array, "b n n"]:
  squares = jnp.square(x).sum(-1, keepdims=True)
  x = x / jnp.sqrt(jnp.maximum(squares, 1e-24))
  return jnp.einsum("bnd,bmd->bnm", x, x)


def resized(
  features: Float[Array, "b n d"], old: tuple[int, int], new: tuple[int, int]
) -> Float[Array, "b m d"]:
  """Returns features on another grid: bicubic, not antialiased, as published.

  Args:
    features: Features of patches, row by row.
    old: Rows and columns of their grid.
    new: Rows and columns of the result's grid.
  """
  if old == new:
    return features
  to_rows, to_columns = (
    jnp.asarray(METHODS["hf"](*sizes), features.dtype)
    for sizes in zip(old, new, strict=True)
  )
  grid = features.reshape(len(features), *old, -1)
  grid = jnp.einsum("yh,xw,bhwd->byxd", to_rows, to_columns, grid)
  return grid.reshape(len(features), -1, grid.shape[-1])

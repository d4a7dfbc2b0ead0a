"""Applies image operations in numpy, without TensorFlow, for `predict`."""

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import preprocessing


def apply(
  image: UInt8[np.ndarray, "h w 3"], ops: str
) -> UInt8[np.ndarray, "height width c"]:
  """Returns the image after the operations.

  Args:
    image: An image of any size.
    ops: See `vit_jax.data.preprocessing`. The first operation, decoding, is
      already done.

  Raises:
    ValueError: Malformed or random `ops`, an image that is smaller than a crop,
      or one that resizing would make too large.

  Example:
    >>> apply(np.zeros((9, 7, 3), np.uint8), "decode|resize(4)").shape
    (4, 4, 3)
  """
  parsed = preprocessing.parse_ops(ops)
  if random := [op.name for op in parsed if op.operation.is_random]:
    raise ValueError(f"got {ops!r} with {', '.join(random)}, which is random.")
  for op in parsed:
    image = op.operation.numpy(image)
  return image


def is_random(ops: str) -> bool:
  """Whether the operations draw random numbers."""
  return any(op.operation.is_random for op in preprocessing.parse_ops(ops))


def check_sides(height: int, width: int, ops: str) -> None:
  """Raises ValueError for an image that resizing would make too large.

  Args:
    height: Pixels of the image after the first operation, decoding.
    width: As `height`.
    ops: See `vit_jax.data.preprocessing`.
  """
  parsed, shapes = preprocessing.parse_ops(ops), preprocessing.shapes(ops)
  sides = shapes[0] or (height, width)
  for op, shape in zip(parsed[1:], shapes[1:], strict=True):
    sides = shape or op.operation.shape(sides)

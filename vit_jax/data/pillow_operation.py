"""Random operations that numpy and Pillow compute, not TensorFlow."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from vit_jax.data.operation import Operation, Shape


@dataclasses.dataclass(frozen=True)
class PillowOperation(Operation):
  """A random operation that numpy and Pillow compute.

  Where several stand side by side, an image passes all of them outside of
  TensorFlow, see `vit_jax.data.ops`.
  """

  num_draws: ClassVar[int]  # uniform numbers in [0, 1) that it needs

  def draws(self, key: Any) -> Any:
    """Returns the random numbers of a key, a tensor float32 [n]."""
    from vit_jax.data.tf_cpu import tf

    return tf.random.stateless_uniform([self.num_draws], key)

  def pillow(self, image: Any, draws: Any) -> Any:
    """Returns an image: a picture of Pillow, or an array uint8 [h, w, 3].

    Args:
      image: A picture of Pillow, or an array uint8 [h, w, 3].
      draws: The numbers of `draws`, an array.
    """
    raise NotImplementedError

  def tensorflow(self, image, key):
    sides = tuple(image.shape[:2])
    after = self.shape(None if None in sides else sides)
    return apply([self], image, [key], after)


def apply(
  operations: Sequence[PillowOperation],
  image: Any,
  keys: Sequence[Any],
  shape: Shape,
) -> Any:
  """Returns the image after operations, a tensor uint8 [height, width, 3].

  Args:
    operations: The operations.
    image: A tensor uint8 [h, w, 3].
    keys: A key for each operation.
    shape: (height, width) afterwards; None: not known.
  """
  from vit_jax.data.tf_cpu import tf

  def changed(image, *draws):
    for operation, numbers in zip(operations, draws, strict=True):
      image = operation.pillow(image, numbers)
    return np.asarray(image)

  draws = [op.draws(key) for op, key in zip(operations, keys, strict=True)]
  made = tf.numpy_function(changed, [image, *draws], tf.uint8, stateful=False)
  return tf.ensure_shape(made, [*(shape or (None, None)), 3])

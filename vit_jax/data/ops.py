"""Applies image operations in TensorFlow, each with a key of its own.

A key is int64 [2], as for TensorFlow's stateless functions.
"""

from collections.abc import Callable

from vit_jax.data import preprocessing
from vit_jax.data.operation import Shape
from vit_jax.data.operations import FlipLR
from vit_jax.data.tf_cpu import tf
from vit_jax.options import unexpected

BoundOp = Callable[..., tf.Tensor]


def bind(text: str) -> tuple[BoundOp, ...]:
  """Returns one function (image, seed_pair) -> image for each operation.

  The key of an operation is derived from the pair and the operation's position
  in the string. So two random operations, or the same one twice, draw
  independently.

  Raises:
    ValueError: See `preprocessing.shapes`.
  """
  shapes = [None, *preprocessing.shapes(text)]
  return tuple(
    _bound(op, i, shapes[i], shapes[i + 1])
    for i, op in enumerate(preprocessing.parse_ops(text))
  )


@tf.function(reduce_retracing=True)
def are_flipped(position: int, seed_pairs: tf.Tensor) -> tf.Tensor:
  """Returns whether the `flip_lr` at a position mirrors images, bool [n].

  Args:
    position: Its number among the operations.
    seed_pairs: (root + epoch, record) of each image, int64 [n, 2].
  """
  keys = _key_at(position, seed_pairs)
  return tf.map_fn(FlipLR.is_flipped, keys, fn_output_signature=tf.bool)


def apply(image: tf.Tensor, text: str, seed_pair: tf.Tensor) -> tf.Tensor:
  """Returns an image after all operations.

  Args:
    image: Encoded bytes, or uint8 [h, w, c].
    text: Operations, see `vit_jax.data.preprocessing`.
    seed_pair: int64 [2], different for each record and epoch.

  Raises:
    ValueError: See `preprocessing.shapes`.
  """
  for op in bind(text):
    image = op(image, seed_pair)
  return image


def _bound(
  op: preprocessing.Op, position: int, before: Shape, after: Shape
) -> BoundOp:
  """Returns the operation on images of a shape; None for sides that vary.

  Args:
    op: The operation.
    position: Its number among the operations.
    before: (height, width) before it.
    after: (height, width) after it.
  """

  def fn(image, seed_pair):
    if before is not None:  # TensorFlow does not always know it.
      image = tf.ensure_shape(image, [*before, 3])
    image = op.operation.tensorflow(image, _key_at(position, seed_pair))
    return _checked(image, op.name, after) if op.is_own else image

  return fn


def _checked(image, name: str, shape: Shape) -> tf.Tensor:
  image = tf.convert_to_tensor(image)
  if image.dtype != tf.uint8:
    raise ValueError(unexpected(name, f"image {image.dtype.name}", "uint8"))
  return tf.ensure_shape(image, [*(shape or (None, None)), 3])


def _key_at(position: int, seed_pair: tf.Tensor) -> tf.Tensor:
  """Returns the key of the operation at a position."""
  # Injective for up to 64 operations; Philox does the scrambling.
  return tf.cast(seed_pair, tf.int64) * [1, 64] + [0, position]

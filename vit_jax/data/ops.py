"""Applies image operations in TensorFlow, each with a key of its own.

A key is int64 [2], as for TensorFlow's stateless functions.
"""

import itertools
from collections.abc import Callable

from vit_jax.data import pillow_operation, preprocessing
from vit_jax.data.operation import Shape
from vit_jax.data.operations import FlipLR
from vit_jax.data.tf_cpu import tf
from vit_jax.options import unexpected

BoundOp = Callable[..., tf.Tensor]


def bind(text: str) -> tuple[BoundOp, ...]:
  """Returns functions (image, seed_pair) -> image, the first for decoding.

  There is one for each operation, but only one for Pillow's operations side by
  side: between TensorFlow and numpy an image is copied.

  The key of an operation is derived from the pair and the operation's position
  in the string. So two random operations, or the same one twice, draw
  independently.

  Raises:
    ValueError: See `preprocessing.shapes`.
  """
  shapes = [None, *preprocessing.shapes(text)]
  numbered = enumerate(preprocessing.parse_ops(text))
  bound: list[BoundOp] = []
  for is_pillow, group in itertools.groupby(numbered, _is_pillow):
    ops = list(group)
    if is_pillow and len(ops) > 1:
      last = ops[-1][0]
      bound.append(_bound_together(dict(ops), shapes[last + 1]))
    else:
      bound += [_bound(op, i, shapes[i], shapes[i + 1]) for i, op in ops]
  return tuple(bound)


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


def _is_pillow(numbered: tuple[int, preprocessing.Op]) -> bool:
  return isinstance(numbered[1].operation, pillow_operation.PillowOperation)


def _bound_together(ops: dict[int, preprocessing.Op], after: Shape) -> BoundOp:
  """Returns several operations of Pillow, by position, as one function."""
  operations = [op.operation for op in ops.values()]

  def fn(image, seed_pair):
    keys = [_key_at(position, seed_pair) for position in ops]
    return pillow_operation.apply(operations, image, keys, after)

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

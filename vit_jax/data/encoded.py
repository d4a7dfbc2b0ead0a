"""Encoded images in TensorFlow's graph: which decoder may have them, upright.

TensorFlow's decoders apply no EXIF orientation, read some formats wrongly or
with all frames, take memory for as many pixels as a header states, and cut a
crop out of a JPEG whose end is missing. Most files are known by a few bytes to
have none of these problems; the others are looked at with Pillow first.
"""

from collections.abc import Callable

import numpy as np

from vit_jax.data import images
from vit_jax.data.host_tf import tf

Image = tf.Tensor

# Segments before the tables of a JPEG may hold EXIF; 64 KiB is the largest.
_HEAD = 2**16
_TABLES, _JFIF, _END = b"\xff\xdb", b"\xff\xe0\x00\x10", b"\xff\xd9"
_JFIF_BYTES = 2 + 18  # where the next segment begins
_PNG = b"\x89PNG\r\n\x1a\n"


def decoded(
  data: tf.Tensor,
  plain: Callable[[], Image],
  jpeg: Callable[[tf.Tensor], Image],
  other: Callable[[Image], Image],
  *,
  exif: bool,
) -> Image:
  """Decodes an image by one of three functions.

  Args:
    data: Bytes of the file, string [].
    plain: Decodes it as a JPEG that needs no more care.
    jpeg: Decodes it as a JPEG, and turns it as its argument says, int32 [], see
      `images.turned`.
    other: Gets the whole upright image of another format, uint8 [h, w, 3].
    exif: Whether the orientation is applied; otherwise it is 1.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: the file is no image, is cut
      off, or is too large.
  """

  def by_tensorflow():
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])

  def by_pillow():
    # An error is told in words by `Source.rescue`.
    image = tf.numpy_function(
      lambda x: _or_empty(x, exif), [data], tf.uint8, stateful=False
    )
    image = _where(tf.size(image) > 0, image)
    return tf.ensure_shape(image, [None, None, 3])

  def odd():
    turn = tf.cond(_is_plain_png(data), lambda: 1, lambda: _turn(data))
    is_jpeg = tf.io.is_jpeg(data)
    return tf.cond(
      is_jpeg,
      lambda: jpeg(turn if exif else tf.ones_like(turn)),
      lambda: other(tf.cond(turn > 0, by_tensorflow, by_pillow)),
    )

  return tf.cond(_is_plain_jpeg(data), plain, odd)


def jpeg_shape(data: tf.Tensor) -> tf.Tensor:
  """Returns (height, width, channels) of a JPEG, int32, by its header.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: it has too many pixels.
  """
  shape = tf.image.extract_jpeg_shape(data)
  pixels = tf.cast(shape[0], tf.float32) * tf.cast(shape[1], tf.float32)
  return _where(pixels <= images.MAX_PIXELS, shape)


def upright(image: Image, turn: tf.Tensor) -> Image:
  """Does in the graph what `images.turned` does."""

  def turned():
    swapped = tf.cond(
      turn >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image
    )
    axes = tf.boolean_mask([0, 1], tf.stack(_mirrored(turn)))
    return tf.reverse(swapped, axes)

  image = tf.cond(turn > 1, turned, lambda: image)
  return tf.ensure_shape(image, [None, None, 3])


def stored_window(begin, extent, shape, turn):
  """Returns where a box of the upright image is among the stored pixels.

  Args:
    begin: (y, x) of the box, int32.
    extent: Its (height, width).
    shape: (height, width) of the upright image.
    turn: See `images.turned`.

  Returns:
    (y, x, height, width), int32.
  """
  is_mirrored = tf.stack(_mirrored(turn))
  begin = tf.where(is_mirrored, shape - begin - extent, begin)
  order = lambda pair: tf.where(turn >= 5, pair[::-1], pair)
  return tf.concat([order(begin), order(extent)], 0)


def as_bytes(data) -> bytes:
  """Returns the bytes that `tf.numpy_function` passes, outside a graph too."""
  return data if isinstance(data, bytes) else data.item()


def _mirrored(turn) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns whether top and bottom, and left and right, are exchanged."""
  is_any = lambda *numbers: tf.reduce_any(turn == tf.constant(numbers))
  return is_any(3, 4, 7, 8), is_any(2, 3, 6, 7)


def _is_plain_jpeg(data):
  """Whether the file ends as a JPEG does, and is without EXIF."""
  at = lambda start, count: tf.strings.substr(data, start, count)
  begin = at(2, 4)
  is_bare = (tf.strings.substr(begin, 0, 2) == _TABLES) | (
    (begin == _JFIF) & (at(_JFIF_BYTES, 2) == _TABLES)
  )
  # RE2 takes 1 us for 1 kB; most files are bare.
  head = at(0, tf.where(is_bare, 0, _HEAD))
  has_exif = tf.strings.regex_full_match(head, r"\C*Exif\x00\x00\C*")
  return tf.io.is_jpeg(data) & (at(-2, 2) == _END) & ~has_exif


def _is_plain_png(data):
  """Whether it is a PNG without EXIF and of a size that is allowed."""
  sides = tf.io.decode_raw(
    tf.strings.substr(data, 16, 8), tf.int32, little_endian=False
  )
  pixels = tf.reduce_prod(tf.cast(sides, tf.float32))
  return (
    (tf.strings.substr(data, 0, 8) == _PNG)
    & (pixels <= images.MAX_PIXELS)
    & ~tf.strings.regex_full_match(data, r"\C*eXIf\C*")
  )


def _turn(data):
  turn = tf.numpy_function(_turn_or_fault, [data], tf.int32, stateful=False)
  turn = tf.ensure_shape(turn, [])
  return _where(turn >= 0, turn)


def _turn_or_fault(data):
  try:
    return np.int32(images.turn(as_bytes(data)))
  except ValueError:  # told in words by `Source.rescue`
    return np.int32(-1)


def _or_empty(data, exif: bool):
  try:
    return images.read(as_bytes(data), exif=exif)
  except ValueError:
    return np.zeros([0, 0, 3], np.uint8)


def _where(is_good, value):
  """Returns the value, or fails in the graph."""
  # tf.debugging.Assert would add a branch.
  check = tf.raw_ops.Assert(condition=is_good, data=["not decoded"])
  if check is None:  # outside of a graph, where it has raised already
    return value
  with tf.control_dependencies([check]):
    return tf.identity(value)

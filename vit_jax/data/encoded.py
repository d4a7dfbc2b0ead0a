"""Decodes images in TensorFlow's graph, with Pillow where TensorFlow cannot.

TensorFlow's decoders apply no EXIF orientation, read some formats wrongly or
with all frames, allocate memory for as many pixels as a header states, and cut
a crop out of a JPEG whose end is missing. For most files a few bytes show that
none of this applies; Pillow inspects the others first.
"""

from collections.abc import Callable

import numpy as np

from vit_jax.data import images
from vit_jax.data.tf_cpu import as_bytes, tf

Image = tf.Tensor

# A JPEG without metadata: its first segment is JFIF's, of 18 bytes, the next
# one begins with the marker of a table, and the end is there.
_START, _TABLES, _END = b"\xff\xd8\xff\xe0\x00\x10", b"\xff\xdb", b"\xff\xd9"
_TABLES_AT = 2 + 18
_PNG = b"\x89PNG\r\n\x1a\n"


def decoded(
  data: tf.Tensor,
  plain: Callable[[], Image],
  jpeg: Callable[[tf.Tensor], Image],
  other: Callable[[Image], Image],
  *,
  exif: bool,
  background: str | None,
  max_pixels: int,
) -> Image:
  """Decodes an image by one of three functions.

  Args:
    data: Bytes of the file, string [].
    plain: Decodes a JPEG that needs no inspection.
    jpeg: Decodes another JPEG and turns it by its argument, an orientation,
      int32 [], see `images.turned`.
    other: Receives the whole upright image of another format, uint8 [h, w, 3].
    exif: Whether the orientation is applied; otherwise it is 1.
    background: See `images.read`.
    max_pixels: See `images.read`.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: the file is not an image, is
      cut off, or is too large.
  """

  options = {"exif": exif, "background": background, "max_pixels": max_pixels}

  def by_tensorflow():
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])

  def by_pillow():
    # The careful pass finds out what the error is.
    image = tf.numpy_function(
      lambda x: _or_empty(x, options), [data], tf.uint8, stateful=False
    )
    image = if_good(tf.size(image) > 0, image)
    return tf.ensure_shape(image, [None, None, 3])

  def odd():
    is_known = _is_bare_png(data, max_pixels) | _is_jpeg_without_exif(data)
    turn = tf.cond(is_known, lambda: 1, lambda: _turn(data, max_pixels))
    return tf.cond(
      tf.io.is_jpeg(data),
      lambda: jpeg(turn if exif else tf.ones_like(turn)),
      lambda: other(tf.cond(turn > 0, by_tensorflow, by_pillow)),
    )

  # Most nodes of a function are not copied into the graph, where each would
  # cost time though the branch is not taken.
  odd = tf.function(
    odd, autograph=False, experimental_attributes={"_noinline": True}
  )
  image = tf.cond(_is_bare_jpeg(data), plain, odd)
  return tf.ensure_shape(image, [None, None, 3])


def jpeg_shape(data: tf.Tensor, max_pixels: int) -> tf.Tensor:
  """Returns (height, width, channels) of a JPEG from its header, int32.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: it has too many pixels.
  """
  shape = tf.image.extract_jpeg_shape(data, tf.int64)
  pixels = tf.reduce_prod(shape[:2])
  return tf.cast(if_good(pixels <= max_pixels, shape), tf.int32)


def upright(image: Image, turn: tf.Tensor) -> Image:
  """Turns an image as `images.turned` does, in the graph."""

  def turned():
    swapped = tf.cond(
      turn >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image
    )
    axes = tf.boolean_mask([0, 1], tf.stack(_mirrored(turn)))
    return tf.reverse(swapped, axes)

  image = tf.cond(turn > 1, turned, lambda: image)
  return tf.ensure_shape(image, [None, None, 3])


def stored_window(begin, extent, shape, turn):
  """Returns the place of a box of the upright image in the stored pixels.

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


def if_good(is_good: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  """Returns the value, or fails in the graph without a message.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: `is_good` is False.
  """
  # tf.debugging.Assert would add a branch.
  check = tf.raw_ops.Assert(condition=is_good, data=["refused"])
  if check is None:  # outside of a graph, where it has raised already
    return value
  with tf.control_dependencies([check]):
    return tf.identity(value)


def _mirrored(turn) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns whether top and bottom, and left and right, are exchanged."""
  is_any = lambda *numbers: tf.reduce_any(turn == tf.constant(numbers))
  return is_any(3, 4, 7, 8), is_any(2, 3, 6, 7)


def _is_bare_jpeg(data):
  """Whether data are a JPEG without metadata that has its end."""
  parts = ((0, _START), (_TABLES_AT, _TABLES), (-len(_END), _END))
  bytes_there = [tf.strings.substr(data, at, len(part)) for at, part in parts]
  return tf.strings.join(bytes_there) == b"".join(part for _, part in parts)


def _is_jpeg_without_exif(data):
  """Whether data are a JPEG with metadata other than EXIF that has its end."""
  is_whole = tf.strings.substr(data, -len(_END), len(_END)) == _END
  return tf.io.is_jpeg(data) & is_whole & ~_has(data, b"Exif\0\0")


def _is_bare_png(data, max_pixels: int):
  """Whether data are a PNG without alpha and EXIF, with safe sides."""
  # The colour types are grey, colour, palette, grey and colour with alpha.
  is_opaque = tf.strings.substr(data, 25, 1)[..., None] == [b"\0", b"\2", b"\3"]
  sides = tf.strings.substr(data, 16, 8)
  sides = tf.io.decode_raw(sides, tf.int32, little_endian=False)
  return (
    (tf.strings.substr(data, 0, len(_PNG)) == _PNG)
    & (tf.reduce_max(sides) <= int(max_pixels**0.5))
    & tf.reduce_any(is_opaque)
    & ~_has(data, b"tRNS")
    & ~_has(data, b"eXIf")
  )


def _has(data, part: bytes):
  """Whether a file contains these bytes."""
  # A fifth of the time of a regular expression.
  parts = tf.raw_ops.StringSplitV2(input=data[None], sep=part, maxsplit=1)
  return parts.shape[1] > 1


def _turn(data, max_pixels: int):
  turn = tf.numpy_function(
    lambda x: _turn_or_error(x, max_pixels), [data], tf.int32, stateful=False
  )
  turn = tf.ensure_shape(turn, [])
  return if_good(turn >= 0, turn)


def _turn_or_error(data, max_pixels: int):
  try:
    return np.int32(images.turn(as_bytes(data), max_pixels))
  except ValueError:  # the careful pass reports it
    return np.int32(-1)


def _or_empty(data, options):
  try:
    return images.read(as_bytes(data), **options)
  except ValueError:
    return np.zeros([0, 0, 3], np.uint8)

"""RandAugment: random distortions of an image, as in AugReg's training.

Every layer applies one of 16 operations, drawn uniformly and with replacement.
Only `magnitude` decides its strength. The operations, their strengths and their
order are those of the code that trained AugReg and the plain ViT-S/16
(big_vision; magnitude 10 was meant as the strongest). The published accuracies
include its irregularities, so they are here, too:

- solarize's threshold is an uint8: 256 at magnitude 10 and 512 at 20 become 0,
  and the image is inverted, as by `invert`. At 15 it is 384 - 256 = 128.
- contrast moves colours away from a level that is the number of pixels / 256,
  196 at 224 px, not from the mean of the image.
- posterize keeps 4 bits at 10, 6 at 15 and all 8 at 20: less and less effect.
- color, contrast, brightness and sharpness have a factor of 0.1 + 0.18 *
  magnitude: above 5 they only increase, below 5 they only decrease.
- at magnitude 0 all but the moving ones, cutout and solarize_add still act:
  solarize inverts, posterize keeps 1 bit, and these factors are 0.1.
- translations are in pixels, whatever the size of the image; shears keep the
  upper left corner in its place, not the centre.

Source: arXiv:1909.13719; arXiv:2106.10270, section 3.3.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.data.tf_cpu import tf

FILL = 128  # level of what an operation leaves empty, in every channel
# The weights of red, green and blue in grey, as TensorFlow has them.
GREY = (0.2989, 0.587, 0.114)


class Draw(NamedTuple):
  """The random numbers of an operation; scalars.

  is_negative: int32, 0 or 1: the sign of an angle, shear or shift.
  y: float32 in [0, 1), for the vertical centre of `cutout`.
  x: The same for the horizontal centre.
  """

  is_negative: tf.Tensor
  y: tf.Tensor
  x: tf.Tensor


def randaug(image, key, num_layers, magnitude):
  """Applies `num_layers` random operations; see this file.

  Args:
    image: uint8 [h, w, 3] of a known size.
    key: int64 [2].
    num_layers: Number of operations, one after the other.
    magnitude: 0 to 20.
  """
  # One draw for all, since each has a price.
  draws = tf.random.stateless_uniform([num_layers, 4], key)
  for layer in range(num_layers):
    number, sign, y, x = tf.unstack(draws[layer])
    draw = Draw(tf.cast(sign < 0.5, tf.int32), y, x)
    branches = [
      functools.partial(fn, image, magnitude, draw)
      for fn in DISTORTIONS.values()
    ]
    # Only the one that is drawn is computed.
    number = tf.cast(number * len(branches), tf.int32)
    image = tf.ensure_shape(tf.switch_case(number, branches), image.shape)
  return image


def autocontrast(image, magnitude, draw):
  """Stretches each channel to 0..255."""
  del magnitude, draw
  low = tf.cast(tf.reduce_min(image, [0, 1]), tf.float32)
  high = tf.cast(tf.reduce_max(image, [0, 1]), tf.float32)
  is_flat = high <= low
  scale = tf.where(is_flat, 1.0, 255.0 / tf.maximum(high - low, 1.0))
  offset = tf.where(is_flat, 0.0, -low * scale)
  levels = _rows(tf.cast(image, tf.float32))
  levels = levels * _of_channels(scale, image) + _of_channels(offset, image)
  return tf.reshape(_to_uint8(levels), image.shape)


def equalize(image, magnitude, draw):
  """Gives each channel a flat histogram, as Pillow does."""
  del magnitude, draw
  levels = tf.range(256)
  # Channel c has the levels from 256 c on.
  index = _rows(tf.cast(image, tf.int32)) + _of_channels([0, 256, 512], image)
  counts = tf.raw_ops.DenseBincount(
    input=tf.reshape(index, [-1]), size=768, weights=np.zeros(0, np.int32)
  )
  counts = tf.reshape(counts, [3, 256])
  is_last = levels == tf.reduce_max(
    tf.where(counts > 0, levels, -1), 1, keepdims=True
  )
  last = tf.reduce_sum(tf.where(is_last, counts, 0), 1, keepdims=True)
  step = (tf.reduce_sum(counts, 1, keepdims=True) - last) // 255
  sums = tf.cumsum(counts, 1, exclusive=True) + step // 2
  # Below the first pixel the sum is 0, and so is Pillow's first entry.
  table = tf.minimum(sums // tf.maximum(step, 1), 255)
  table = tf.where(levels > 0, table, 0)
  table = tf.cast(tf.where(step == 0, levels, table), tf.uint8)
  return tf.reshape(tf.gather(tf.reshape(table, [-1]), index), image.shape)


def invert(image, magnitude, draw):
  """255 - x."""
  del magnitude, draw
  return 255 - image


def rotate(image, magnitude, draw):
  """Rotates by 3 degrees * magnitude about the centre."""
  return _moved(image, _rotation, magnitude * 30 / 10, draw)


def posterize(image, magnitude, draw):
  """Keeps the upper 0.4 * magnitude bits, but at least one."""
  del draw
  bits = max(1, int(magnitude / 10 * 4))
  return tf.bitwise.bitwise_and(image, np.uint8(256 - 2 ** (8 - bits)))


def solarize(image, magnitude, draw):
  """Inverts the levels from 25.6 * magnitude modulo 256 on."""
  del draw
  threshold = int(magnitude / 10 * 256) % 256
  return tf.bitwise.bitwise_xor(image, _all_bits(image >= threshold))


def solarize_add(image, magnitude, draw):
  """Adds 11 * magnitude to the levels below 128, up to 255."""
  del draw
  amount = int(magnitude / 10 * 110)
  added = tf.minimum(image, 255 - amount) + amount
  is_low = tf.bitwise.right_shift(image, np.uint8(7)) - 1  # all bits, or none
  return tf.maximum(image, tf.bitwise.bitwise_and(added, is_low))


def color(image, magnitude, draw):
  """Moves colours away from grey; towards it, if the factor is below 1."""
  del draw
  levels = _rows(tf.cast(image, tf.float32) * np.float32(1 / 255))
  levels = tf.reshape(levels * _of_channels(GREY, image), [-1, 3])
  # A product with ones adds the channels, and repeats the sum, in less time.
  grey = tf.floor(tf.matmul(levels, tf.ones([3, 3])) * 255.5)
  return _blend(tf.reshape(grey, image.shape), image, magnitude)


def contrast(image, magnitude, draw):
  """Moves levels away from (number of pixels / 256)."""
  del draw
  pixels = image.shape[0] * image.shape[1]
  return _blend(float(min(pixels // 256, 255)), image, magnitude)


def brightness(image, magnitude, draw):
  """Multiplies the levels."""
  del draw
  return _blend(0.0, image, magnitude)


def sharpness(image, magnitude, draw):
  """Moves pixels away from the mean of their neighbours, but at the border."""
  del draw
  inner = _blend(smooth(image), image[1:-1, 1:-1], magnitude)
  middle = tf.concat([image[1:-1, :1], inner, image[1:-1, -1:]], 1)
  return tf.concat([image[:1], middle, image[-1:]], 0)


def shear_x(image, magnitude, draw):
  """Shifts row y by 0.03 * magnitude * y pixels."""
  return _moved(image, _shear_x, magnitude / 10 * 0.3, draw)


def shear_y(image, magnitude, draw):
  """Shifts column x by 0.03 * magnitude * x pixels."""
  return _moved(image, _shear_y, magnitude / 10 * 0.3, draw)


def translate_x(image, magnitude, draw):
  """Shifts by 10 * magnitude pixels to the left or right."""
  return _shifted(image, 1, 10 * magnitude, draw)


def translate_y(image, magnitude, draw):
  """Shifts by 10 * magnitude pixels up or down."""
  return _shifted(image, 0, 10 * magnitude, draw)


def cutout(image, magnitude, draw):
  """Fills a square of 8 * magnitude pixels; any pixel may be its centre."""
  reach = int(magnitude / 10 * 40)
  height, width = image.shape[:2]

  def span(share, size):
    centre = tf.cast(share * size, tf.int32)
    return tf.maximum(centre - reach, 0), tf.minimum(centre + reach, size)

  (top, bottom), (left, right) = span(draw.y, height), span(draw.x, width)
  middle = image[top:bottom]
  hole = tf.fill([bottom - top, right - left, 3], np.uint8(FILL))
  middle = tf.concat([middle[:, :left], hole, middle[:, right:]], 1)
  return tf.concat([image[:top], middle, image[bottom:]], 0)


# In the order of the published code, which the drawn number is an index of.
DISTORTIONS: dict[str, Callable[..., tf.Tensor]] = {
  "autocontrast": autocontrast,
  "equalize": equalize,
  "invert": invert,
  "rotate": rotate,
  "posterize": posterize,
  "solarize": solarize,
  "color": color,
  "contrast": contrast,
  "brightness": brightness,
  "sharpness": sharpness,
  "shear_x": shear_x,
  "shear_y": shear_y,
  "translate_x": translate_x,
  "translate_y": translate_y,
  "cutout": cutout,
  "solarize_add": solarize_add,
}


def _rows(image):
  """Returns [h, w * 3]: TensorFlow is slow where the last dimension is 3."""
  return tf.reshape(image, [image.shape[0], -1])


def _of_channels(values, image):
  """Repeats 3 values, one a channel, along the rows of `_rows`."""
  return tf.tile(values, [image.shape[1]])


def _all_bits(condition):
  """Returns 255 where true, and 0 elsewhere."""
  return tf.cast(condition, tf.uint8) * 255


def _to_uint8(levels):
  """Drops the fractions."""
  return tf.cast(tf.clip_by_value(levels, 0.0, 255.0), tf.uint8)


def _blend(start, image, magnitude):
  """Returns start + factor * (image - start), the fraction dropped."""
  factor = magnitude / 10 * 1.8 + 0.1
  return _to_uint8(start + factor * (tf.cast(image, tf.float32) - start))


def smooth(image):
  """Returns (sum of 3 x 3 pixels + 4 * their centre) / 13, fraction dropped.

  Where the sum is a multiple of 13, rounding decides whether a level is lost.
  Here it is added row by row in float32, as TensorFlow's convolution does. With
  oneDNN, TensorFlow rounds once for a product and its sum, and 1 level in 200
  is another (see the test).
  """
  height, width = image.shape[:2]
  pixels = tf.cast(image, tf.float32)
  outer, centre = pixels * np.float32(1 / 13), pixels * np.float32(5 / 13)
  total = tf.add_n(
    [
      (centre if (y, x) == (1, 1) else outer)[
        y : y + height - 2, x : x + width - 2
      ]
      for y in range(3)
      for x in range(3)
    ]
  )
  return tf.floor(total)


def _shifted(image, axis, pixels, draw):
  size = image.shape[axis]
  pixels = min(pixels, size)
  shape = [*image.shape]
  shape[axis] = pixels
  empty = tf.fill(shape, np.uint8(FILL))
  wide = tf.concat([empty, image, empty], axis)
  begin = [0, 0, 0]
  begin[axis] = 2 * pixels * (1 - draw.is_negative)
  return tf.slice(wide, begin, image.shape)


def _moved(image, transform, amount, draw):
  """Returns each pixel from the nearest to where the transform says."""
  height, width = image.shape[:2]
  tables = np.stack(
    [_sources(transform, s * amount, height, width) for s in (1, -1)]
  )
  pixels = tf.reshape(image, [-1, 3])
  pixels = tf.concat([pixels, tf.fill([1, 3], np.uint8(FILL))], 0)
  index = tf.constant(tables)[draw.is_negative]
  return tf.gather_nd(pixels, index[..., None])


@functools.cache
def _sources(transform, amount, height, width):
  """Returns the number of the source pixel for each pixel [h, w].

  The number of pixels stands for an empty place. It computes in float32 and in
  the order of TensorFlow's own transform; halves are rounded away from zero.
  """
  y, x = np.mgrid[:height, :width].astype(np.float32)
  a, b, c, d, e, f = np.array(transform(amount, height, width), np.float32)
  x, y = (_rounded(v) for v in (a * x + b * y + c, d * x + e * y + f))
  is_inside = (0 <= x) & (x < width) & (0 <= y) & (y < height)
  return np.where(is_inside, y * width + x, height * width).astype(np.int32)


def _rounded(x):
  x = x.astype(np.float64)
  return np.copysign(np.floor(np.abs(x) + 0.5), x).astype(np.int64)


def _rotation(degrees, height, width):
  angle = np.float32(degrees) * np.float32(np.pi / 180)
  cos, sin = np.cos(angle), np.sin(angle)
  right, bottom = np.float32(width - 1), np.float32(height - 1)
  x = (right - (cos * right - sin * bottom)) / 2
  y = (bottom - (sin * right + cos * bottom)) / 2
  return cos, -sin, x, sin, cos, y


def _shear_x(amount, height, width):
  return 1, amount, 0, 0, 1, 0


def _shear_y(amount, height, width):
  return 1, 0, 0, amount, 1, 0

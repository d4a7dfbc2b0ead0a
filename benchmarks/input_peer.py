"""The TensorFlow calls of big_vision's preprocessing, for comparison.

They are an Inception crop of a JPEG, a flip, RandAugment with 16 operations and
values in [-1, 1], arranged as in big_vision, because the arrangement decides
the cost. Every operation of RandAugment is its own branch, one after the other,
taken or not. Geometry is TensorFlow's projective transform of an image with a
fourth channel, which marks filled pixels. Each channel has its own histogram.
Random numbers are stateful.

A test compares the operations of RandAugment with stored outputs of the
published code.
"""

import functools
import math
from collections.abc import Callable

from vit_jax.data.tf_cpu import tf

SIZE = 224
FILL = 128
Image = tf.Tensor


def image_of(fused: bool, randaug: tuple[int, float] | None = None):
  """Returns fn(bytes of a JPEG) -> float32 [224, 224, 3] in [-1, 1].

  Args:
    fused: Whether only the crop is decoded; otherwise the whole
      image is decoded.
    randaug: Layers and magnitude of RandAugment; None: without it.
  """

  def fn(data: tf.Tensor) -> Image:
    if fused:
      shape = tf.image.extract_jpeg_shape(data)
    else:
      whole = tf.io.decode_image(data, channels=3, expand_animations=False)
      shape = tf.shape(whole)
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
      shape,
      tf.zeros([0, 0, 4], tf.float32),
      min_object_covered=0,
      area_range=(0.05, 1.0),
      use_image_if_no_bounding_boxes=True,
    )
    if fused:
      (y, x, _), (height, width, _) = tf.unstack(begin), tf.unstack(extent)
      window = tf.stack([y, x, height, width])
      crop = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    else:
      crop = tf.slice(whole, begin, extent)
      crop.set_shape([None, None, 3])
    image = tf.cast(tf.image.resize(crop, [SIZE, SIZE]), tf.uint8)
    image = tf.image.random_flip_left_right(image)
    if randaug:
      image = distorted(image, *randaug)
    return tf.cast(image, tf.float32) / 127.5 - 1.0

  return fn


def distorted(image: Image, num_layers: int, magnitude: float) -> Image:
  """Applies RandAugment to an image uint8 [h, w, 3]."""
  for _ in range(num_layers):
    chosen = tf.random.uniform([], maxval=len(OPS), dtype=tf.int32)
    for i, name in enumerate(OPS):
      image = tf.cond(
        tf.equal(i, chosen),
        functools.partial(OPS[name], image, magnitude, _signed),
        lambda image=image: image,
      )
  return image


def _signed(value: float) -> tf.Tensor:
  """Returns the value, or with equal probability its negative."""
  keeps_sign = tf.cast(tf.floor(tf.random.uniform([]) + 0.5), tf.bool)
  return tf.cond(keeps_sign, lambda: value, lambda: -value)


def _blend(start: Image, image: Image, factor: float) -> Image:
  start, end = tf.cast(start, tf.float32), tf.cast(image, tf.float32)
  mixed = start + factor * (end - start)
  if 0 < factor < 1:
    return tf.cast(mixed, tf.uint8)
  return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def _factor(magnitude: float) -> float:
  return magnitude / 10 * 1.8 + 0.1


def _by_channel(fn: Callable[[Image], Image], image: Image) -> Image:
  return tf.stack([fn(image[:, :, c]) for c in range(3)], 2)


def _autocontrast(image, magnitude, sign):
  def stretched(channel):
    low = tf.cast(tf.reduce_min(channel), tf.float32)
    high = tf.cast(tf.reduce_max(channel), tf.float32)

    def scaled():
      scale = 255.0 / (high - low)
      levels = tf.cast(channel, tf.float32) * scale - low * scale
      return tf.cast(tf.clip_by_value(levels, 0.0, 255.0), tf.uint8)

    return tf.cond(high > low, scaled, lambda: channel)

  return _by_channel(stretched, image)


def _equalize(image, magnitude, sign):
  def flattened(channel):
    levels = tf.cast(channel, tf.int32)
    counts = tf.histogram_fixed_width(levels, [0, 255], nbins=256)
    filled = tf.reshape(tf.gather(counts, tf.where(counts != 0)), [-1])
    step = (tf.reduce_sum(filled) - filled[-1]) // 255

    def mapped():
      table = (tf.cumsum(counts) + step // 2) // step
      table = tf.clip_by_value(tf.concat([[0], table[:-1]], 0), 0, 255)
      return tf.gather(table, levels)

    return tf.cast(tf.cond(step == 0, lambda: levels, mapped), tf.uint8)

  return _by_channel(flattened, image)


def _invert(image, magnitude, sign):
  return 255 - tf.convert_to_tensor(image)


def _posterize(image, magnitude, sign):
  shift = tf.cast(8 - int(magnitude / 10 * 4), image.dtype)
  return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def _solarize(image, magnitude, sign):
  threshold = int(magnitude / 10 * 256) % 256  # an uint8 there
  return tf.where(image < threshold, image, 255 - image)


def _solarize_add(image, magnitude, sign):
  added = tf.cast(image, tf.int64) + int(magnitude / 10 * 110)
  added = tf.cast(tf.clip_by_value(added, 0, 255), tf.uint8)
  return tf.where(image < 128, added, image)


def _color(image, magnitude, sign):
  grey = tf.image.grayscale_to_rgb(tf.image.rgb_to_grayscale(image))
  return _blend(grey, image, _factor(magnitude))


def _contrast(image, magnitude, sign):
  grey = tf.cast(tf.image.rgb_to_grayscale(image), tf.int32)
  counts = tf.histogram_fixed_width(grey, [0, 255], nbins=256)
  mean = tf.reduce_sum(tf.cast(counts, tf.float32)) / 256.0
  level = tf.clip_by_value(tf.ones_like(grey, tf.float32) * mean, 0.0, 255.0)
  start = tf.image.grayscale_to_rgb(tf.cast(level, tf.uint8))
  return _blend(start, image, _factor(magnitude))


def _brightness(image, magnitude, sign):
  return _blend(tf.zeros_like(image), image, _factor(magnitude))


def _sharpness(image, magnitude, sign):
  kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13.0
  kernel = tf.tile(kernel[:, :, None, None], [1, 1, 3, 1])
  smooth = tf.nn.depthwise_conv2d(
    tf.cast(image, tf.float32)[None], kernel, [1, 1, 1, 1], "VALID"
  )
  smooth = tf.cast(tf.clip_by_value(smooth, 0.0, 255.0), tf.uint8)[0]
  border = [[1, 1], [1, 1], [0, 0]]
  is_inner = tf.pad(tf.ones_like(smooth), border) == 1
  smooth = tf.where(is_inner, tf.pad(smooth, border), image)
  return _blend(smooth, image, _factor(magnitude))


def _moved(image: Image, transform) -> Image:
  """Transforms an image, and fills what is outside of it."""
  marked = tf.concat([image, tf.ones_like(image[:, :, :1])], 2)
  marked = tf.raw_ops.ImageProjectiveTransformV3(
    images=marked[None],
    transforms=tf.cast(tf.stack(transform), tf.float32)[None],
    output_shape=tf.shape(image)[:2],
    fill_value=0.0,
    interpolation="NEAREST",
    fill_mode="CONSTANT",
  )[0]
  pixels = tf.reshape(marked, [-1, 4])
  fill = tf.constant([FILL, FILL, FILL, 1], tf.uint8)
  pixels = tf.where(pixels[:, 3:] == 0, tf.ones_like(pixels) * fill, pixels)
  return tf.reshape(pixels, tf.shape(marked))[:, :, :3]


def _rotate(image, magnitude, sign):
  angle = sign(magnitude / 10 * 30) * (math.pi / 180)
  cos, sin = tf.cos(angle), tf.sin(angle)
  bottom, right = (tf.cast(n - 1, tf.float32) for n in image.shape[:2])
  x = (right - (cos * right - sin * bottom)) / 2
  y = (bottom - (sin * right + cos * bottom)) / 2
  return _moved(image, [cos, -sin, x, sin, cos, y, 0.0, 0.0])


def _shear_x(image, magnitude, sign):
  amount = sign(magnitude / 10 * 0.3)
  return _moved(image, [1.0, amount, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])


def _shear_y(image, magnitude, sign):
  amount = sign(magnitude / 10 * 0.3)
  return _moved(image, [1.0, 0.0, 0.0, amount, 1.0, 0.0, 0.0, 0.0])


def _translate_x(image, magnitude, sign):
  pixels = sign(magnitude / 10 * 100)
  return _moved(image, [1.0, 0.0, pixels, 0.0, 1.0, 0.0, 0.0, 0.0])


def _translate_y(image, magnitude, sign):
  pixels = sign(magnitude / 10 * 100)
  return _moved(image, [1.0, 0.0, 0.0, 0.0, 1.0, pixels, 0.0, 0.0])


def _cutout(image, magnitude, sign):
  reach = int(magnitude / 10 * 40)
  height, width = tf.shape(image)[0], tf.shape(image)[1]
  y = tf.random.uniform([], maxval=height, dtype=tf.int32)
  x = tf.random.uniform([], maxval=width, dtype=tf.int32)
  top, bottom = tf.maximum(0, y - reach), tf.maximum(0, height - y - reach)
  left, right = tf.maximum(0, x - reach), tf.maximum(0, width - x - reach)
  mask = tf.pad(
    tf.zeros([height - top - bottom, width - left - right], image.dtype),
    [[top, bottom], [left, right]],
    constant_values=1,
  )
  mask = tf.tile(mask[:, :, None], [1, 1, 3])
  return tf.where(mask == 0, tf.ones_like(image) * FILL, image)


OPS = {
  "autocontrast": _autocontrast,
  "equalize": _equalize,
  "invert": _invert,
  "rotate": _rotate,
  "posterize": _posterize,
  "solarize": _solarize,
  "color": _color,
  "contrast": _contrast,
  "brightness": _brightness,
  "sharpness": _sharpness,
  "shear_x": _shear_x,
  "shear_y": _shear_y,
  "translate_x": _translate_x,
  "translate_y": _translate_y,
  "cutout": _cutout,
  "solarize_add": _solarize_add,
}

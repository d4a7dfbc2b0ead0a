"""Parts of the image operations in TensorFlow.

Images are uint8 [h, w, 3].
"""

import functools

from vit_jax.data.operation import Operation, Side, pair
from vit_jax.data.tf_cpu import tf

# Parameters of an inception crop: TensorFlow's defaults, and so big_vision's.
ASPECT_RATIOS = (0.75, 1.33)  # Width over height.
MAX_ATTEMPTS = 100  # After these the whole image is taken.

# Bilinear resizing reads at most four pixels for each new one. With more than
# this many pixels for each new one, most are not read.
_SPARSE = 8


def as_rgb(image):
  """Returns an image with one channel, or none, with three equal ones."""
  if image.shape.rank == 2:
    image = image[..., None]
  return tf.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image


def by_numpy(fn, image, sides: tuple[int | None, int | None]):
  """Returns the result of a function of the image, which has these sides."""
  return tf.ensure_shape(tf.numpy_function(fn, [image], tf.uint8), [*sides, 3])


def crop(image, begin, extent):
  """Returns the box with the corner `begin`, (y, x), and (height, width)."""
  begin = tf.concat([begin, [0]], 0)
  return tf.slice(image, begin, tf.concat([extent, [3]], 0))


def crop_to(image, begin, size: Side):
  """Returns the box of `size` with the corner `begin`, (y, x)."""
  size = pair(size)
  return tf.ensure_shape(crop(image, begin, size), [*size, 3])


def spare(image, operation: Operation):
  """Returns by how many pixels the image exceeds a crop, at least 0, int32 [2].

  Args:
    image: The image.
    operation: A crop to `operation.size`.

  Raises:
    ValueError: The image is smaller, and TensorFlow knows its sides.
    tf.errors.InvalidArgumentError: In the graph: the image is smaller.
  """
  size = pair(operation.size)
  pixels = tf.shape(image)[:2] - size
  if None not in image.shape[:2]:
    operation.shape(tuple(image.shape[:2]))
    return pixels
  error = tf.debugging.Assert(
    tf.reduce_all(pixels >= 0),
    [
      f"in {operation}: expected images of at least {size} pixels, got:",
      tf.shape(image)[:2],
    ],
  )
  with tf.control_dependencies([error] if error is not None else []):
    return tf.identity(pixels)


def resize(image, size: Side, method: str, antialias: bool):
  """Resizes to `size`; an image of that size is not changed."""
  size = pair(size)
  if image.shape[:2] == size:
    return image
  return tf.ensure_shape(resized(image, size, method, antialias), [*size, 3])


def resized(image, size, method, antialias):
  """Returns the image with the sides `size`, which may be a tensor."""
  resize = functools.partial(
    tf.image.resize, size=size, method=method, antialias=antialias
  )
  if method == "bilinear" and not antialias:
    # The same pixels: TensorFlow's kernel has vector code for float32 alone,
    # but a cast takes time and memory for each pixel that is not looked at.
    num_pixels = tf.reduce_prod(tf.shape(image)[:2])
    result = tf.cond(
      num_pixels > _SPARSE * tf.reduce_prod(size),
      lambda: resize(image),
      lambda: resize(tf.cast(image, tf.float32)),
    )
  else:
    result = resize(image)
  if antialias and method != "nearest":
    result = tf.round(result)
  if method == "bicubic":  # the only one that exceeds the range
    result = tf.clip_by_value(result, 0, 255)
  return tf.cast(result, tf.uint8)  # "nearest" stayed uint8


def inception_box(shape, key, area_min, area_max):
  """Returns (y, x) of the corner and (height, width) of a random box."""
  begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
    shape,
    bounding_boxes=tf.zeros([0, 0, 4]),
    seed=key,
    min_object_covered=0.0,
    aspect_ratio_range=ASPECT_RATIOS,
    area_range=(area_min / 100, area_max / 100),
    max_attempts=MAX_ATTEMPTS,
    use_image_if_no_bounding_boxes=True,
  )
  return begin[:2], extent[:2]

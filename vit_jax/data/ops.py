"""The preprocessing operations: how each changes the pixels of one image.

An operation has as arguments an image uint8 [h, w, 3] (for `decode*`: encoded
bytes, or an array that it does not change), a key, and its own parameters. It
returns an image uint8 [h, w, 3]. Keys are int64 [2], as for TensorFlow's
stateless functions. So the same key gives the same pixels in any process and at
any time.

Parameters of several operations: `size` is the new size in pixels, one number
for a square or (height, width). `method` is the filter of a resizing:
"bilinear", "bicubic", "area" or "nearest" (for `*_torch`, Pillow's "bilinear"
or "bicubic"). `antialias` widens the filter when the image shrinks.

Resizing computes in float32 without antialiasing, and then drops the fraction.
The published checkpoints were trained and scored in this way with big_vision
(bit for bit, see tests); it darkens an image by half a level of 255. With
`antialias` the result is rounded, as in Pillow, with which PyTorch's models
were trained and scored.
"""

import functools
from collections.abc import Callable

import numpy as np

from vit_jax.config import preprocessing
from vit_jax.config.preprocessing import MAX_PIXELS
from vit_jax.data import encoded, pillow_augment, pixels
from vit_jax.data.randaugment import randaug
from vit_jax.data.tf_cpu import tf

BoundOp = Callable[..., tf.Tensor]

# Parameters of an inception crop: TensorFlow's defaults, and so big_vision's.
ASPECT_RATIOS = (0.75, 1.33)  # Width over height.
MAX_ATTEMPTS = 100  # After these the whole image is taken.

ERASE_ATTEMPTS = 10
# Red, green and blue of pixels in [0, 1].
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Bilinear resizing reads at most four pixels for each new one. With more than
# this many pixels for each new one, most are not read.
_SPARSE = 8
_NORMAL = 2**60  # beside the keys of epochs, which are roots of 56 bits


def decode(
  image,
  key,
  dct="fast",
  upsampling="fancy",
  exif=True,
  background=None,
  max_pixels=MAX_PIXELS,
):
  """Decodes JPEG, PNG, WebP, GIF (first frame), BMP, TIFF or PPM to RGB.

  Grey becomes three equal channels, 16 bits become 8, and a CMYK JPEG is
  converted.

  Args:
    image: Encoded bytes, or an array that is returned unchanged.
    key: Not used.
    dct: Inverse cosine transform of a JPEG: "fast", TensorFlow's default, or
      "accurate", which with `upsampling` "fancy" is bit for bit Pillow's.
    upsampling: How colours of half the resolution in a JPEG are enlarged:
      "fancy" interpolates them, "plain" repeats them.
    exif: Whether to turn the image upright by its EXIF orientation. The
      published checkpoints were trained and scored without.
    background: Colour behind a transparent image. With None, fully transparent
      pixels become white, and the others keep their colours without alpha.
    max_pixels: An image with more pixels counts as broken.
  """
  del key
  if image.dtype != tf.string:
    return _as_rgb(image)

  def plain():
    with tf.control_dependencies([encoded.jpeg_shape(image, max_pixels)]):
      data = tf.identity(image)
    if (dct, upsampling) == ("fast", "fancy"):
      return tf.io.decode_image(data, channels=3, expand_animations=False)
    return tf.io.decode_jpeg(
      data,
      channels=3,
      fancy_upscaling=upsampling == "fancy",
      dct_method=f"INTEGER_{dct.upper()}",
    )

  return encoded.decoded(
    image,
    plain,
    lambda turn: encoded.upright(plain(), turn),
    lambda whole: whole,
    exif=exif,
    background=background,
    max_pixels=max_pixels,
  )


def decode_inception_crop(
  image,
  key,
  size,
  area_min=5,
  area_max=100,
  background=None,
  max_pixels=MAX_PIXELS,
  method="bilinear",
  antialias=False,
):
  """Computes `decode|inception_crop`, but decodes little outside of the crop.

  The box is that of `inception_crop`. So are the pixels, except the outermost
  ones of the crop of a JPEG with subsampled colours, because the decoder
  interpolates colours without the neighbours outside. They differ by at most 18
  levels of 255 on photographs, and by 0.002 in the mean over a crop of 224 (see
  the test).
  """
  if image.dtype != tf.string:
    image = _as_rgb(image)
    return inception_crop(
      image, key, size, area_min, area_max, method, antialias
    )

  def plain():
    shape = encoded.jpeg_shape(image, max_pixels)
    begin, extent = _inception_box(shape, key, area_min, area_max)
    window = tf.concat([begin, extent], 0)
    return tf.image.decode_and_crop_jpeg(image, window, channels=3)

  def turned(turn):
    shape = encoded.jpeg_shape(image, max_pixels)
    sides = tf.where(turn >= 5, shape[1::-1], shape[:2])
    shape = tf.concat([sides, shape[2:]], 0)
    begin, extent = _inception_box(shape, key, area_min, area_max)
    window = encoded.stored_window(begin, extent, sides, turn)
    crop = tf.image.decode_and_crop_jpeg(image, window, channels=3)
    return encoded.upright(crop, turn)

  def other(whole):
    begin, extent = _inception_box(tf.shape(whole), key, area_min, area_max)
    return _crop(whole, begin, extent)

  crop = encoded.decoded(
    *(image, plain, turned, other),
    exif=True,
    background=background,
    max_pixels=max_pixels,
  )
  return resize(crop, key, size, method, antialias)


def inception_crop(
  image,
  key,
  size,
  area_min=5,
  area_max=100,
  method="bilinear",
  antialias=False,
):
  """Crops a random box and resizes it to `size`.

  The width of the box is 0.75 to 1.33 times its height (as in big_vision; the
  paper says 3/4 to 4/3). If 100 attempts fail, the whole image is used.

  Args:
    image: See this file, also for the other arguments.
    key: Decides the box.
    size: New size.
    area_min: Smallest area of the box, percent of the image.
    area_max: Largest area of the box, percent of the image.
    method: Filter of the resizing.
    antialias: Whether the filter is widened.

  Source: Szegedy et al., arXiv:1409.4842; the sampling is TensorFlow's.
  """
  begin, extent = _inception_box(tf.shape(image), key, area_min, area_max)
  return resize(_crop(image, begin, extent), key, size, method, antialias)


def resize(image, key, size, method="bilinear", antialias=False):
  """Resizes to `size`, without keeping the aspect ratio."""
  del key
  size = preprocessing.pair(size)
  if image.shape[:2] == size:
    return image
  return tf.ensure_shape(_resized(image, size, method, antialias), [*size, 3])


def resize_small(image, key, size, method="area", antialias=False):
  """Resizes the shorter side to `size` pixels, and keeps the aspect ratio.

  Both sides are multiplied by the float32 ratio and rounded to the nearest
  integer, ties to even.

  Raises:
    tf.errors.InvalidArgumentError: In the graph: the result would have more
      than `preprocessing.MAX_PIXELS`; `pixels.check_sides` has the message.
  """
  del key
  sides = tf.cast(tf.shape(image)[:2], tf.float32)
  ratio = tf.cast(size, tf.float32) / tf.reduce_min(sides)
  sides = tf.cast(tf.round(sides * ratio), tf.int64)
  is_good = tf.reduce_prod(sides) <= preprocessing.MAX_PIXELS
  sides = tf.cast(encoded.if_good(is_good, sides), tf.int32)
  return _resized(image, sides, method, antialias)


def central_crop(image, key, size):
  """Crops the centre; an odd pixel remains at the bottom and right."""
  del key
  size = preprocessing.pair(size)
  spare = _spare("central_crop", image, size)
  return tf.ensure_shape(_crop(image, spare // 2, size), [*size, 3])


def resize_torch(image, key, size, method="bicubic"):
  """Resizes to `size`, bit for bit as Pillow."""
  del key
  resized = _by_numpy(pixels.resize_torch, image, size, method)
  return tf.ensure_shape(resized, [*preprocessing.pair(size), 3])


def resize_small_torch(image, key, size, method="bicubic"):
  """Resizes the shorter side to `size` with Pillow, as torchvision does."""
  del key
  return _by_numpy(pixels.resize_small_torch, image, size, method)


def central_crop_torch(image, key, size):
  """Crops the centre as torchvision does: half a pixel is rounded to even."""
  del key
  size = preprocessing.pair(size)
  spare = tf.cast(_spare("central_crop_torch", image, size), tf.float32)
  begin = tf.cast(tf.round(spare / 2), tf.int32)
  return tf.ensure_shape(_crop(image, begin, size), [*size, 3])


def random_crop(image, key, size):
  """Crops a box of `size`; every position is equally likely."""
  size = preprocessing.pair(size)
  spare = _spare("random_crop", image, size)
  begin = tf.random.stateless_uniform(
    [2], key, minval=None, maxval=None, dtype=tf.uint32
  )
  # 32 random bits modulo a few hundred: the bias is below 1e-6.
  begin = tf.cast(begin % tf.cast(spare + 1, tf.uint32), tf.int32)
  return tf.ensure_shape(_crop(image, begin, size), [*size, 3])


def flip_lr(image, key):
  """Mirrors left and right with probability 1/2."""
  # Not tf.where: it takes nearly as long as the decoding of a JPEG.
  return tf.cond(
    _is_flipped(key), lambda: tf.reverse(image, [1]), lambda: image
  )


def _is_flipped(key) -> tf.Tensor:
  return tf.random.stateless_uniform([], key) < 0.5


def pad(image, key, pixels, mode="black"):
  """Adds `pixels` pixels on each side, before a random crop for example.

  They are black. With the mode "reflect" they are the image's own, mirrored at
  its outermost pixels.
  """
  del key
  mode = "CONSTANT" if mode == "black" else "REFLECT"
  return tf.pad(image, [[pixels, pixels], [pixels, pixels], [0, 0]], mode)


def three_augment(image, key):
  """Applies one of DeiT III's three augmentations; see `pillow_augment`."""
  draws = tf.random.stateless_uniform([2], key)
  return _by_pillow(pillow_augment.three_augment, image, draws)


def color_jitter(image, key, strength):
  """Changes brightness, contrast and saturation by up to `strength`, 0 to 1.

  See `pillow_augment.color_jitter`.
  """
  draws = tf.random.stateless_uniform([6], key)
  jitter = functools.partial(
    pillow_augment.color_jitter, strength=float(strength)
  )
  return _by_pillow(jitter, image, draws)


def randaug_timm(image, key, magnitude):
  """Applies timm's `rand-m<magnitude>-mstd0.5-inc1`; see `pillow_augment`."""
  layers = pillow_augment.LAYERS
  draws = tf.random.stateless_uniform([3 * layers], key)
  # Another key: the two functions turn the same bits into their numbers.
  normals = tf.random.stateless_normal([layers], key + [_NORMAL, 0])
  distort = functools.partial(
    pillow_augment.randaug_timm, magnitude=float(magnitude)
  )
  return _by_pillow(distort, image, draws, normals)


def random_erase(image, key, share):
  """Replaces a box by noise, in a share of the images.

  The box covers 2 % to a third of the image. The logarithm of its height /
  width is uniform between those of 0.3 and 1 / 0.3. If ten attempts find no box
  that is smaller than the image, the image does not change. The noise of a
  pixel is normal, with ImageNet's mean and deviation, clipped to 0..255.

  Source: arXiv:1708.04896; timm's RandomErasing of mode "pixel", which erases
    after the normalisation, without clipping.
  """
  height, width, _ = image.shape
  draws = tf.random.stateless_uniform([1 + 4 * ERASE_ATTEMPTS], key)
  area, aspect, y, x = tf.split(draws[1:], 4)
  area = (0.02 + (1 / 3 - 0.02) * area) * height * width
  aspect = tf.exp(np.float32(np.log(0.3)) * (1 - 2 * aspect))
  heights = tf.cast(tf.round(tf.sqrt(area * aspect)), tf.int32)
  widths = tf.cast(tf.round(tf.sqrt(area / aspect)), tf.int32)
  fits = (heights < height) & (widths < width)
  # The first attempt that fits; 0 if none does.
  first = tf.argmax(tf.cast(fits, tf.int32))

  def span(lengths, size, draws):
    length = lengths[first]
    begin = tf.cast(
      draws[first] * tf.cast(size - length + 1, tf.float32), tf.int32
    )
    places = tf.range(size)
    return (places >= begin) & (places < begin + length)

  def erased():
    rows, columns = span(heights, height, y), span(widths, width, x)
    normal = tf.random.stateless_normal(image.shape, key + [_NORMAL, 0])
    noise = tf.constant(IMAGENET_MEAN) + tf.constant(IMAGENET_STD) * normal
    noise = tf.cast(tf.clip_by_value(tf.round(noise * 255), 0, 255), tf.uint8)
    return tf.where((rows[:, None] & columns)[..., None], noise, image)

  is_erased = (draws[0] < share) & tf.reduce_any(fits)
  return tf.cond(is_erased, erased, lambda: image)


def grey(image, key):
  """Returns one channel, the luma of ITU-R 601, rounded as in Pillow."""
  del key
  weights = tf.constant(pixels.LUMA, tf.int32)
  luma = tf.reduce_sum(tf.cast(image, tf.int32) * weights, -1, keepdims=True)
  return tf.cast((luma + 2**15) // 2**16, tf.uint8)


OPS: dict[str, Callable[..., tf.Tensor]] = {
  "decode": decode,
  "decode_inception_crop": decode_inception_crop,
  "inception_crop": inception_crop,
  "resize": resize,
  "resize_small": resize_small,
  "central_crop": central_crop,
  "resize_torch": resize_torch,
  "resize_small_torch": resize_small_torch,
  "central_crop_torch": central_crop_torch,
  "random_crop": random_crop,
  "flip_lr": flip_lr,
  "pad": pad,
  "randaug": randaug,
  "three_augment": three_augment,
  "color_jitter": color_jitter,
  "randaug_timm": randaug_timm,
  "random_erase": random_erase,
  "grey": grey,
}


def bind(text: str) -> tuple[BoundOp, ...]:
  """Returns one function (image, seed_pair) -> image for each operation.

  The key of an operation is derived from the pair and the operation's position
  in the string. So two random operations, or the same one twice, draw
  independently.

  Raises:
    ValueError: See `preprocessing.shapes`.
  """
  shapes = [None, *preprocessing.shapes(text)]
  ops = preprocessing.parse_ops(text)
  return tuple(
    _bound(op, i, shapes[i], shapes[i + 1]) for i, op in enumerate(ops)
  )


@tf.function(reduce_retracing=True)
def are_flipped(position: int, seed_pairs: tf.Tensor) -> tf.Tensor:
  """Returns whether the `flip_lr` at a position mirrors images, bool [n].

  Args:
    position: Its number among the operations.
    seed_pairs: (root + epoch, record) of each image, int64 [n, 2].
  """
  keys = _key_at(position, seed_pairs)
  return tf.map_fn(_is_flipped, keys, fn_output_signature=tf.bool)


def apply(image: tf.Tensor, text: str, seed_pair: tf.Tensor) -> tf.Tensor:
  """Returns an image after all operations.

  Args:
    image: Encoded bytes, or uint8 [h, w, c].
    text: Operations, see `vit_jax.config.preprocessing`.
    seed_pair: int64 [2], different for each record and epoch.

  Raises:
    ValueError: See `preprocessing.shapes`.
  """
  for op in bind(text):
    image = op(image, seed_pair)
  return image


def _bound(
  op: preprocessing.Op,
  position: int,
  shape: preprocessing.Shape,
  after: preprocessing.Shape,
) -> BoundOp:
  """Returns the operation on images of a shape; None for sides that vary.

  Args:
    op: The operation.
    position: Its number among the operations.
    shape: (height, width) before it.
    after: (height, width) after it.
  """

  def fn(image, seed_pair):
    if shape is not None:  # TensorFlow does not always know it.
      image = tf.ensure_shape(image, [*shape, 3])
    key = _key_at(position, seed_pair)
    if own := op.own:
      return _checked(own.tensorflow(image, key), op.name, after)
    return OPS[op.name](image, key, *op.args, **op.kwargs)

  return fn


def _checked(image, name: str, shape: preprocessing.Shape) -> tf.Tensor:
  image = tf.convert_to_tensor(image)
  if image.dtype != tf.uint8:
    raise ValueError(
      f"{name}: got an image {image.dtype.name}, expected uint8; cast it."
    )
  return tf.ensure_shape(image, [*(shape or (None, None)), 3])


def _key_at(position: int, seed_pair: tf.Tensor) -> tf.Tensor:
  """Returns the key of the operation at a position."""
  # Injective for up to 64 operations; Philox does the scrambling.
  return tf.cast(seed_pair, tf.int64) * [1, 64] + [0, position]


def _by_pillow(fn, image, *draws):
  distorted = tf.numpy_function(fn, [image, *draws], tf.uint8, stateful=False)
  return tf.ensure_shape(distorted, image.shape)


def _by_numpy(fn, image, *args):
  resized = tf.numpy_function(lambda x: fn(x, *args), [image], tf.uint8)
  return tf.ensure_shape(resized, [None, None, 3])


def _as_rgb(image):
  if image.shape.rank == 2:
    image = image[..., None]
  return tf.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image


def _crop(image, begin, extent):
  begin = tf.concat([begin, [0]], 0)
  return tf.slice(image, begin, tf.concat([extent, [3]], 0))


def _resized(image, size, method, antialias):
  resize = functools.partial(
    tf.image.resize, size=size, method=method, antialias=antialias
  )
  if method == "bilinear" and not antialias:
    # The same pixels: TensorFlow's kernel has vector code for float32 alone,
    # but a cast takes time and memory for each pixel that is not looked at.
    num_pixels = tf.reduce_prod(tf.shape(image)[:2])
    resized = tf.cond(
      num_pixels > _SPARSE * tf.reduce_prod(size),
      lambda: resize(image),
      lambda: resize(tf.cast(image, tf.float32)),
    )
  else:
    resized = resize(image)
  if antialias and method != "nearest":
    resized = tf.round(resized)
  if method == "bicubic":  # the only one that exceeds the range
    resized = tf.clip_by_value(resized, 0, 255)
  return tf.cast(resized, tf.uint8)  # "nearest" stayed uint8


def _inception_box(shape, key, area_min, area_max):
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


def _spare(name, image, size):
  """Returns by how many pixels the image exceeds `size`, at least 0."""
  spare = tf.shape(image)[:2] - size
  if None not in image.shape[:2]:
    preprocessing.SHAPE_FNS[name](tuple(image.shape[:2]), size)
    return spare
  error = tf.debugging.Assert(
    tf.reduce_all(spare >= 0),
    [
      f"in {name}{size}: expected images at least that large; resize them"
      f" first, e.g. resize_small({max(size)})|{name}{size}. Got pixels:",
      tf.shape(image)[:2],
    ],
  )
  with tf.control_dependencies([error] if error is not None else []):
    return tf.identity(spare)

"""The image operations: arguments, sizes, and pixels in TensorFlow and numpy.

`OPERATIONS` has one class for each name in the language of
`vit_jax.data.preprocessing`. `shape` checks the arguments and computes the new
size. `tensorflow` computes the pixels for training and scoring; the same key
gives the same pixels in any process and at any time. `numpy` computes them for
`predict`; only operations without randomness have it. Both give the same pixels
bit for bit, except with antialiasing, where 1 pixel in 1,000 differs by 1 level
of 255 (see the test).

Arguments of several operations: `size` is the new size in pixels, one number
for a square or (height, width). `method` is the filter of a resizing:
"bilinear", "bicubic", "area" or "nearest" (for `*_torch`, Pillow's "bilinear"
or "bicubic"). `antialias` widens the filter when the image shrinks.

Resizing computes in float32 without antialiasing, and then drops the fraction.
The published checkpoints were trained and scored in this way with big_vision
(bit for bit, see tests); it darkens an image by half a level of 255. With
`antialias` the result is rounded, as in Pillow, with which PyTorch's models
were trained and scored.

TensorFlow, Pillow and what needs them are imported inside the methods, so that
the language loads neither.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from vit_jax.data.operation import (
  MAX_PIXELS,
  Number,
  Operation,
  Shape,
  Side,
  check_decoding,
  pair,
)
from vit_jax.data.pillow_operation import PillowOperation
from vit_jax.options import check_choice, unexpected

PAD_MODES = ("black", "reflect")
RESIZE_METHODS = ("bilinear", "bicubic", "area", "nearest")
TORCH_FILTERS = ("bicubic", "bilinear")

ERASE_ATTEMPTS = 10
CROP_ATTEMPTS = 10
# Red, green and blue of pixels in [0, 1].
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Shares of red, green and blue in grey, by 2^16: ITU-R 601.
LUMA = (19595, 38470, 7471)
_NORMAL = 2**60  # beside the keys of epochs, which are roots of 56 bits

operation = dataclasses.dataclass(frozen=True)


@operation
class Decode(Operation):
  """Decodes JPEG, PNG, WebP, GIF (first frame), BMP, TIFF or PPM to RGB.

  Grey becomes three equal channels, 16 bits become 8, and a CMYK JPEG is
  converted. An array is not changed.

  Args:
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

  dct: str = "fast"
  upsampling: str = "fancy"
  exif: bool = True
  background: str | None = None
  max_pixels: int = MAX_PIXELS

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.dct, ("fast", "accurate"), "dct")
    check_choice(self.upsampling, ("fancy", "plain"), "upsampling")
    is_bool = isinstance(self.exif, bool)
    _require(is_bool, "exif", self.exif, "True or False")
    check_decoding(self.background, self.max_pixels)
    return None

  def tensorflow(self, image, key):
    from vit_jax.data import encoded, tf_pixels
    from vit_jax.data.tf_cpu import tf

    if image.dtype != tf.string:
      return tf_pixels.as_rgb(image)

    def plain():
      shape = encoded.jpeg_shape(image, self.max_pixels)
      with tf.control_dependencies([shape]):
        data = tf.identity(image)
      if (self.dct, self.upsampling) == ("fast", "fancy"):
        return tf.io.decode_image(data, channels=3, expand_animations=False)
      return tf.io.decode_jpeg(
        data,
        channels=3,
        fancy_upscaling=self.upsampling == "fancy",
        dct_method=f"INTEGER_{self.dct.upper()}",
      )

    return encoded.decoded(
      image,
      plain,
      lambda turn: encoded.upright(plain(), turn),
      lambda whole: whole,
      exif=self.exif,
      background=self.background,
      max_pixels=self.max_pixels,
    )

  def numpy(self, image):
    return image  # decoded by `images.read`


@operation
class InceptionCrop(Operation):
  """Crops a random box and resizes it to `size`.

  The width of the box is 0.75 to 1.33 times its height (as in big_vision; the
  paper says 3/4 to 4/3). If 100 attempts fail, the whole image is used.

  Args:
    size: New size.
    area_min: Smallest area of the box, percent of the image.
    area_max: Largest area of the box, percent of the image.
    method: Filter of the resizing.
    antialias: Whether the filter is widened.

  Source: Szegedy et al., arXiv:1409.4842; the sampling is TensorFlow's.
  """

  size: Side
  area_min: Number = 5
  area_max: Number = 100
  method: str = "bilinear"
  antialias: bool = False

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.method, RESIZE_METHODS, "method")
    areas = self.area_min, self.area_max  # percent of the image
    is_good = 0 < self.area_min <= self.area_max <= 100
    expected = "0 < area_min <= area_max <= 100"
    _require(is_good, "area_min, area_max", areas, expected)
    return pair(self.size)

  def tensorflow(self, image, key):
    from vit_jax.data import tf_pixels
    from vit_jax.data.tf_cpu import tf

    box = tf_pixels.inception_box(
      tf.shape(image), key, self.area_min, self.area_max
    )
    crop = tf_pixels.crop(image, *box)
    return tf_pixels.resize(crop, self.size, self.method, self.antialias)


@operation
class DecodeInceptionCrop(Operation):
  """Computes `decode|inception_crop`, but decodes little outside of the crop.

  The box is that of `inception_crop`. So are the pixels, except the outermost
  ones of the crop of a JPEG with subsampled colours, because the decoder
  interpolates colours without the neighbours outside. They differ by at most 18
  levels of 255 on photographs, and by 0.002 in the mean over a crop of 224 (see
  the test).
  """

  size: Side
  area_min: Number = 5
  area_max: Number = 100
  background: str | None = None
  max_pixels: int = MAX_PIXELS
  method: str = "bilinear"
  antialias: bool = False

  @property
  def inception_crop(self) -> InceptionCrop:
    """The crop of an image that is decoded."""
    return InceptionCrop(
      self.size, self.area_min, self.area_max, self.method, self.antialias
    )

  def shape(self, shape: Shape) -> Shape:
    check_decoding(self.background, self.max_pixels)
    return self.inception_crop.shape(shape)

  def tensorflow(self, image, key):
    from vit_jax.data import encoded, tf_pixels
    from vit_jax.data.tf_cpu import tf

    if image.dtype != tf.string:
      return self.inception_crop.tensorflow(tf_pixels.as_rgb(image), key)
    box = functools.partial(
      tf_pixels.inception_box,
      key=key,
      area_min=self.area_min,
      area_max=self.area_max,
    )

    def plain():
      window = tf.concat(box(encoded.jpeg_shape(image, self.max_pixels)), 0)
      return tf.image.decode_and_crop_jpeg(image, window, channels=3)

    def turned(turn):
      shape = encoded.jpeg_shape(image, self.max_pixels)
      sides = tf.where(turn >= 5, shape[1::-1], shape[:2])
      begin, extent = box(tf.concat([sides, shape[2:]], 0))
      window = encoded.stored_window(begin, extent, sides, turn)
      crop = tf.image.decode_and_crop_jpeg(image, window, channels=3)
      return encoded.upright(crop, turn)

    crop = encoded.decoded(
      image,
      plain,
      turned,
      lambda whole: tf_pixels.crop(whole, *box(tf.shape(whole))),
      exif=True,
      background=self.background,
      max_pixels=self.max_pixels,
    )
    return tf_pixels.resize(crop, self.size, self.method, self.antialias)


@operation
class Resize(Operation):
  """Resizes to `size`, without keeping the aspect ratio."""

  size: Side
  method: str = "bilinear"
  antialias: bool = False

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.method, RESIZE_METHODS, "method")
    return pair(self.size)

  def tensorflow(self, image, key):
    from vit_jax.data import tf_pixels

    return tf_pixels.resize(image, self.size, self.method, self.antialias)

  def numpy(self, image):
    from vit_jax.data import np_pixels

    return np_pixels.resize(image, self.size, self.method, self.antialias)


@operation
class ResizeSmall(Operation):
  """Resizes the shorter side to `size` pixels, and keeps the aspect ratio.

  Both sides are multiplied by the float32 ratio and rounded to the nearest
  integer, ties to even. An image of more than `MAX_PIXELS` is not made: in the
  graph it raises InvalidArgumentError; `pixels.check_sides` has the message.
  """

  size: Side
  method: str = "area"
  antialias: bool = False

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.method, RESIZE_METHODS, "method")
    _check_shorter_side(self.size)
    if shape is None:
      return None
    ratio = np.float32(self.size) / np.float32(min(shape))
    height, width = np.round(np.array(shape, np.float32) * ratio)
    made = int(height), int(width)
    return _bounded(f"resize_small({self.size})", shape, made)

  def tensorflow(self, image, key):
    from vit_jax.data import encoded, tf_pixels
    from vit_jax.data.tf_cpu import tf

    sides = tf.cast(tf.shape(image)[:2], tf.float32)
    ratio = tf.cast(self.size, tf.float32) / tf.reduce_min(sides)
    sides = tf.cast(tf.round(sides * ratio), tf.int64)
    is_good = tf.reduce_prod(sides) <= MAX_PIXELS
    sides = tf.cast(encoded.if_good(is_good, sides), tf.int32)
    return tf_pixels.resized(image, sides, self.method, self.antialias)

  def numpy(self, image):
    from vit_jax.data import np_pixels

    sides = self.shape(image.shape[:2])
    return np_pixels.resize(image, sides, self.method, self.antialias)


@operation
class ResizeTorch(Operation):
  """Resizes to `size`, bit for bit as Pillow, which rounds between the axes."""

  size: Side
  method: str = "bicubic"

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.method, TORCH_FILTERS, "method")
    return pair(self.size)

  def tensorflow(self, image, key):
    from vit_jax.data import tf_pixels

    return tf_pixels.by_numpy(self.numpy, image, pair(self.size))

  def numpy(self, image):
    from vit_jax.data import np_pixels

    return np_pixels.resize_torch(image, pair(self.size), self.method)


@operation
class ResizeSmallTorch(Operation):
  """Resizes as torchvision's Resize(size): the longer side is rounded down."""

  size: Side
  method: str = "bicubic"

  def shape(self, shape: Shape) -> Shape:
    check_choice(self.method, TORCH_FILTERS, "method")
    _check_shorter_side(self.size)
    if shape is None:
      return None
    height, width = (self.size * side // min(shape) for side in shape)
    return _bounded(f"resize_small_torch({self.size})", shape, (height, width))

  def tensorflow(self, image, key):
    from vit_jax.data import tf_pixels

    return tf_pixels.by_numpy(self.numpy, image, (None, None))

  def numpy(self, image):
    from vit_jax.data import np_pixels

    sides = self.shape(image.shape[:2])
    return np_pixels.resize_torch(image, sides, self.method)


@operation
class Crop(Operation):
  """Crops a box of `size`; the base of three operations."""

  size: Side

  def shape(self, shape: Shape) -> Shape:
    size = pair(self.size)
    fits = shape is None or (size[0] <= shape[0] and size[1] <= shape[1])
    _require(fits, "size", size, f"at most the {shape} pixels of the image")
    return size

  def tensorflow(self, image, key):
    from vit_jax.data import tf_pixels

    spare = tf_pixels.spare(image, self)
    return tf_pixels.crop_to(image, self.corner(spare, key), self.size)

  def corner(self, spare, key):
    """Returns (y, x) of the box, int32 [2]; `spare` is the last corner."""
    raise NotImplementedError


@operation
class CentralCrop(Crop):
  """Crops the centre; an odd pixel remains at the bottom and right."""

  def corner(self, spare, key):
    return spare // 2

  def numpy(self, image):
    height, width = self.shape(image.shape[:2])
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


@operation
class CentralCropTorch(Crop):
  """Crops as torchvision's CenterCrop: half a pixel is rounded to even."""

  def corner(self, spare, key):
    from vit_jax.data.tf_cpu import tf

    return tf.cast(tf.round(tf.cast(spare, tf.float32) / 2), tf.int32)

  def numpy(self, image):
    height, width = self.shape(image.shape[:2])
    top = round((image.shape[0] - height) / 2)
    left = round((image.shape[1] - width) / 2)
    return image[top : top + height, left : left + width]


@operation
class RandomCrop(Crop):
  """Crops a box of `size`; every position is equally likely."""

  def corner(self, spare, key):
    from vit_jax.data.tf_cpu import tf

    bits = tf.random.stateless_uniform(
      [2], key, minval=None, maxval=None, dtype=tf.uint32
    )
    # 32 random bits modulo a few hundred: the bias is below 1e-6.
    return tf.cast(bits % tf.cast(spare + 1, tf.uint32), tf.int32)


@operation
class FlipLR(PillowOperation):
  """Mirrors left and right with probability 1/2."""

  def tensorflow(self, image, key):
    from vit_jax.data.tf_cpu import tf

    # Not tf.where: it takes nearly as long as the decoding of a JPEG.
    return tf.cond(
      self.is_flipped(key), lambda: tf.reverse(image, [1]), lambda: image
    )

  def draws(self, key):
    return self.is_flipped(key)

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    return torch_pixels.flip(image) if draws else image

  @staticmethod
  def is_flipped(key):
    """Returns whether the image of a key is mirrored, bool []."""
    from vit_jax.data.tf_cpu import tf

    return tf.random.stateless_uniform([], key) < 0.5


@operation
class Pad(Operation):
  """Adds `pixels` pixels on each side, before a random crop for example.

  They are black. With the mode "reflect" they are the image's own, mirrored at
  its outermost pixels.
  """

  pixels: int
  mode: str = "black"

  def shape(self, shape: Shape) -> Shape:
    pixels = self.pixels
    check_choice(self.mode, PAD_MODES, "mode")
    is_count = isinstance(pixels, int) and pixels >= 0
    _require(is_count, "pixels", pixels, "the pixels to add on each side")
    if shape is None:
      return None
    fits = self.mode != "reflect" or pixels < min(shape)
    _require(fits, "pixels", pixels, f"less than the sides {shape}")
    return shape[0] + 2 * pixels, shape[1] + 2 * pixels

  def tensorflow(self, image, key):
    from vit_jax.data.tf_cpu import tf

    mode = "CONSTANT" if self.mode == "black" else "REFLECT"
    return tf.pad(image, self._paddings(), mode)

  def numpy(self, image):
    mode = "constant" if self.mode == "black" else "reflect"
    return np.pad(image, self._paddings(), mode)

  def _paddings(self):
    return [[self.pixels, self.pixels], [self.pixels, self.pixels], [0, 0]]


@operation
class RandAug(Operation):
  """Applies `num_layers` of AugReg's distortions; see `data.randaugment`.

  Args:
    num_layers: Number of distortions, one after the other.
    magnitude: 0 to 20.
  """

  num_layers: int
  magnitude: int

  def shape(self, shape: Shape) -> Shape:
    layers, magnitude = self.num_layers, self.magnitude
    is_fixed = shape is not None and min(shape) >= 3
    _require(is_fixed, "size of images", shape, "one size, at least 3 x 3")
    is_count = isinstance(layers, int) and layers >= 1
    _require(is_count, "num_layers", layers, "1 or more")
    # posterize and solarize_add are not defined above 20.
    is_known = isinstance(magnitude, int) and 0 <= magnitude <= 20
    _require(is_known, "magnitude", magnitude, "a whole number from 0 to 20")
    return shape

  def tensorflow(self, image, key):
    from vit_jax.data.randaugment import randaug

    return randaug(image, key, self.num_layers, self.magnitude)


@operation
class ThreeAugment(PillowOperation):
  """Applies one of DeiT III's three augmentations; see `pillow_augment`."""

  num_draws: ClassVar = 2

  def pillow(self, image, draws):
    from vit_jax.data import pillow_augment

    return pillow_augment.three_augment(image, draws)


@operation
class ColorJitter(PillowOperation):
  """Changes brightness, contrast and saturation by up to `strength`, 0 to 1.

  In distribution it is jitter(strength, strength, strength, 0, 1). See
  `pillow_augment.color_jitter`.
  """

  strength: Number

  num_draws: ClassVar = 6

  def shape(self, shape: Shape) -> Shape:
    _check_share(self.strength, "strength")
    return shape

  def pillow(self, image, draws):
    from vit_jax.data import pillow_augment

    return pillow_augment.color_jitter(image, draws, float(self.strength))


@operation
class RandAugTimm(PillowOperation):
  """Applies timm's `rand-m<magnitude>-mstd0.5-inc1`; see `pillow_augment`."""

  magnitude: Number

  def shape(self, shape: Shape) -> Shape:
    is_known = 0 <= self.magnitude <= 10
    _require(is_known, "magnitude", self.magnitude, "0 to 10")
    return shape

  def draws(self, key):
    from vit_jax.data import pillow_augment
    from vit_jax.data.tf_cpu import tf

    layers = pillow_augment.LAYERS
    draws = tf.random.stateless_uniform([3 * layers], key)
    # Another key: the two functions turn the same bits into their numbers.
    normals = tf.random.stateless_normal([layers], key + [_NORMAL, 0])
    return tf.concat([draws, normals], 0)

  def pillow(self, image, draws):
    from vit_jax.data import pillow_augment

    count = 3 * pillow_augment.LAYERS
    return pillow_augment.randaug_timm(
      image, draws[:count], draws[count:], float(self.magnitude)
    )


@operation
class RandomResizedCrop(PillowOperation):
  """Crops a random box and resizes it, as torchvision's RandomResizedCrop.

  The width of the box is 3/4 to 4/3 of its height; the filter is Pillow's
  bicubic. See `torch_pixels.box`.

  Args:
    size: New size.
    scale_min: Smallest area of the box, a share of the image.
    scale_max: Largest area of the box.
  """

  size: Side
  scale_min: Number
  scale_max: Number

  num_draws: ClassVar = 4 * CROP_ATTEMPTS

  def shape(self, shape: Shape) -> Shape:
    scales = self.scale_min, self.scale_max
    is_good = 0 < self.scale_min <= self.scale_max <= 1
    expected = "0 < scale_min <= scale_max <= 1, shares of the image"
    _require(is_good, "scale_min, scale_max", scales, expected)
    return pair(self.size)

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    sides = torch_pixels.sides(image)
    place = torch_pixels.box(*sides, self.scale_min, self.scale_max, draws)
    return torch_pixels.resized_crop(image, place, pair(self.size))


@operation
class Jitter(PillowOperation):
  """Changes the colours of a share of the images, as torchvision's ColorJitter.

  The factor of brightness is uniform in [max(0, 1 - x), 1 + x], where x is its
  argument; so are those of contrast and saturation. The hue is shifted by up to
  `hue` turns, at most 1/2. The changes have a random order.

  Args:
    brightness: 0: it does not change.
    contrast: As `brightness`.
    saturation: As `brightness`.
    hue: As `brightness`.
    p: The share of the images.
  """

  brightness: Number
  contrast: Number
  saturation: Number
  hue: Number
  p: Number

  num_draws: ClassVar = 9

  def shape(self, shape: Shape) -> Shape:
    for name in ("brightness", "contrast", "saturation"):
      value = getattr(self, name)
      _require(value >= 0, name, value, "0 or more")
    _require(0 <= self.hue <= 0.5, "hue", self.hue, "0 to 0.5, in turns")
    _check_share(self.p, "p")
    return shape

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    if draws[0] >= self.p:
      return image
    ranges = [
      (max(0, 1 - x), 1 + x) if x else None
      for x in (self.brightness, self.contrast, self.saturation)
    ]
    ranges.append((-self.hue, self.hue) if self.hue else None)
    factors = [
      ends and ends[0] + (ends[1] - ends[0]) * u
      for ends, u in zip(ranges, draws[1:5].tolist(), strict=True)
    ]
    return torch_pixels.jitter(image, factors, np.argsort(draws[5:]).tolist())


@operation
class RandomGrey(PillowOperation):
  """Removes the colours of a share `p` of the images; three channels remain."""

  p: Number

  num_draws: ClassVar = 1

  def shape(self, shape: Shape) -> Shape:
    _check_share(self.p, "p")
    return shape

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    return torch_pixels.grey(image) if draws[0] < self.p else image


@operation
class GaussianBlur(PillowOperation):
  """Blurs a share `p` of the images, as torchvision's GaussianBlur.

  Args:
    p: The share of the images.
    kernel: Side of the kernel in pixels, an odd number.
    sigma_min: Smallest standard deviation in pixels; it is uniform.
    sigma_max: Largest standard deviation.
  """

  p: Number
  kernel: int = 9
  sigma_min: Number = 0.1
  sigma_max: Number = 2.0

  num_draws: ClassVar = 2

  def shape(self, shape: Shape) -> Shape:
    _check_share(self.p, "p")
    kernel, sigmas = self.kernel, (self.sigma_min, self.sigma_max)
    is_odd = isinstance(kernel, int) and kernel > 0 and kernel % 2 == 1
    _require(is_odd, "kernel", kernel, "an odd number of pixels")
    is_good = 0 < sigmas[0] <= sigmas[1]
    _require(
      is_good, "sigma_min, sigma_max", sigmas, "0 < sigma_min <= sigma_max"
    )
    # The image is mirrored at its outermost pixels.
    fits = shape is not None and min(shape) > kernel // 2
    least = kernel // 2 + 1
    _require(fits, "size of images", shape, f"one size, at least {least}")
    return shape

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    share, sigma = draws.tolist()
    if share >= self.p:
      return image
    sigma = self.sigma_min + (self.sigma_max - self.sigma_min) * sigma
    return torch_pixels.gaussian_blur(image, self.kernel, sigma)


@operation
class Solarize(PillowOperation):
  """Inverts the levels from `threshold` on, in a share `p` of the images."""

  p: Number
  threshold: int = 128

  num_draws: ClassVar = 1

  def shape(self, shape: Shape) -> Shape:
    _check_share(self.p, "p")
    is_level = isinstance(self.threshold, int) and 0 <= self.threshold <= 256
    _require(is_level, "threshold", self.threshold, "a level from 0 to 256")
    return shape

  def pillow(self, image, draws):
    from vit_jax.data import torch_pixels

    if draws[0] >= self.p:
      return image
    return torch_pixels.solarize(image, self.threshold)


@operation
class RandomErase(Operation):
  """Replaces a box by noise, in a share of the images.

  The box covers 2 % to a third of the image. The logarithm of its height /
  width is uniform between those of 0.3 and 1 / 0.3. If ten attempts find no box
  that is smaller than the image, the image does not change. The noise of a
  pixel is normal, with ImageNet's mean and deviation, clipped to 0..255.

  Source: arXiv:1708.04896; timm's RandomErasing of mode "pixel", which erases
    after the normalisation, without clipping.
  """

  share: Number

  def shape(self, shape: Shape) -> Shape:
    _require(shape is not None, "size of images", shape, "one size")
    _check_share(self.share, "share")
    return shape

  def tensorflow(self, image, key):
    from vit_jax.data.tf_cpu import tf

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

    is_erased = (draws[0] < self.share) & tf.reduce_any(fits)
    return tf.cond(is_erased, erased, lambda: image)


@operation
class Grey(Operation):
  """Returns one channel, the luma of ITU-R 601, rounded as in Pillow."""

  def tensorflow(self, image, key):
    from vit_jax.data.tf_cpu import tf

    weights = tf.constant(LUMA, tf.int32)
    luma = tf.reduce_sum(tf.cast(image, tf.int32) * weights, -1, keepdims=True)
    return tf.cast((luma + 2**15) // 2**16, tf.uint8)

  def numpy(self, image):
    luma = (image.astype(np.int32) * LUMA).sum(-1, keepdims=True)
    return ((luma + 2**15) // 2**16).astype(np.uint8)


OPERATIONS: dict[str, type[Operation]] = {
  "decode": Decode,
  "decode_inception_crop": DecodeInceptionCrop,
  "inception_crop": InceptionCrop,
  "resize": Resize,
  "resize_small": ResizeSmall,
  "central_crop": CentralCrop,
  "resize_torch": ResizeTorch,
  "resize_small_torch": ResizeSmallTorch,
  "central_crop_torch": CentralCropTorch,
  "random_crop": RandomCrop,
  "flip_lr": FlipLR,
  "pad": Pad,
  "randaug": RandAug,
  "three_augment": ThreeAugment,
  "color_jitter": ColorJitter,
  "randaug_timm": RandAugTimm,
  "random_erase": RandomErase,
  "random_resized_crop": RandomResizedCrop,
  "jitter": Jitter,
  "random_grey": RandomGrey,
  "gaussian_blur": GaussianBlur,
  "solarize": Solarize,
  "grey": Grey,
}


def _require(is_good: bool, name: str, value: object, expected: str) -> None:
  if not is_good:
    raise ValueError(unexpected(name, repr(value), expected))


def _check_share(value: Number, name: str) -> None:
  is_share = 0 <= value <= 1
  _require(is_share, name, value, "0 to 1")


def _check_shorter_side(size: Side) -> None:
  is_count = isinstance(size, int) and size >= 1
  _require(is_count, "size", size, "pixels of the shorter side, such as 256")


def _bounded(
  op: str, sides: tuple[int, int], made: tuple[int, int]
) -> tuple[int, int]:
  """Returns the sides after an operation.

  Raises:
    ValueError: They have more than `MAX_PIXELS`.
  """
  got = f"{sides[1]:,} x {sides[0]:,} pixels, of which {op} would make"
  got += f" {made[1]:,} x {made[0]:,}"
  if made[0] * made[1] > MAX_PIXELS:
    raise ValueError(
      f"got {got}, expected at most {MAX_PIXELS:,} in all; crop the image."
    )
  return made

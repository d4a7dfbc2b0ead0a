"""The interface of an image operation, and checks of common arguments."""

import dataclasses
from typing import Any

from vit_jax.options import unexpected

# Height x width; an RGB image of this size has a quarter of a GiB. Pillow warns
# about larger ones.
MAX_PIXELS = 2**28 // 3

Shape = tuple[int, int] | None  # (height, width); None: different sizes
Side = int | tuple[int, int]  # one number stands for a square
Number = int | float


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation on an image: a frozen dataclass, whose fields are arguments.

  The types of the fields of one's own operation are checked, as those of a
  config's options; `__post_init__` may raise ValueError for a wrong value.

  Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Darken(Operation):
    ...   levels: int = 10
    ...
    ...   def tensorflow(self, image, key):
    ...     return image - tf.minimum(image, tf.cast(self.levels, tf.uint8))
    ...
    ...   def numpy(self, image):
    ...     return image - np.minimum(image, np.uint8(self.levels))
  """

  def shape(self, shape: Shape) -> Shape:
    """Returns (height, width) after the operation; None: different sizes.

    By default the operation changes no size. It may raise ValueError.

    Args:
      shape: (height, width) before; None: images have different sizes.
    """
    return shape

  def tensorflow(self, image: Any, key: Any) -> Any:
    """Returns an image, a tensor uint8 [height, width, 3], in TensorFlow.

    Args:
      image: A tensor uint8 [h, w, 3].
      key: int64 [2], the seed of TensorFlow's stateless functions; another one
        for each record, epoch, crop and operation.
    """
    raise NotImplementedError

  def numpy(self, image: Any) -> Any:
    """Returns the same image in numpy, for `predict`.

    Define it only for an operation that is not random.

    Args:
      image: An array uint8 [h, w, 3].
    """
    raise NotImplementedError

  @property
  def is_random(self) -> bool:
    """Whether it has no `numpy`: `predict` then refuses it."""
    return type(self).numpy is Operation.numpy


def pair(size: Side) -> tuple[int, int]:
  """Returns (height, width) in pixels; one number means a square.

  Raises:
    ValueError: `size` is neither a positive integer nor two of them.
  """
  sides = (size, size) if isinstance(size, int) else size
  is_pair = isinstance(sides, tuple | list) and len(sides) == 2
  if not is_pair or not all(isinstance(s, int) and s > 0 for s in sides):
    expected = "pixels such as 224 or (height, width)"
    raise ValueError(unexpected("size", repr(size), expected))
  return tuple(sides)


def colour(text: str) -> tuple[int, int, int]:
  """Returns red, green and blue of a colour, 0 to 255.

  Args:
    text: A colour of Pillow and CSS: "white", "#ff8800", "rgb(255, 136, 0)".

  Raises:
    ValueError: The text is no colour.

  Example:
    >>> colour("white"), colour("#f80")
    ((255, 255, 255), (255, 136, 0))
  """
  from PIL import ImageColor  # here, because --help does not need it

  try:
    return ImageColor.getrgb(text)[:3]
  except (ValueError, TypeError, AttributeError):
    expected = "a colour such as white or '#ff8800'"
    raise ValueError(unexpected("background", repr(text), expected)) from None


def check_decoding(background: str | None, max_pixels: int) -> None:
  """Checks two arguments of decoding.

  Raises:
    ValueError: The background is no colour, or max_pixels is not 1 or more.
  """
  if background is not None:
    colour(background)
  if not isinstance(max_pixels, int) or max_pixels < 1:
    raise ValueError(unexpected("max_pixels", repr(max_pixels), "1 or more"))

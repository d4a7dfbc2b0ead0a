"""The language of preprocessing: "decode|inception_crop(224)|flip_lr".

Operations are separated by `|`; arguments are Python literals. This module has
the signature of every operation and computes the size of its images, so that
errors are reported before TensorFlow is imported. `vit_jax.data.ops` computes
the pixels, under the same names.

An operation of one's own stands there by its import path,
"decode|resize(224)|my_lab.ops:Fade(0.5)|flip_lr", see `Operation`.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.batch import RESERVED, View
from vit_jax.names import is_path, resolve, split
from vit_jax.options import check_choice, nearest, parse_value

# Height x width; an RGB image of this size has a quarter of a GiB. Pillow warns
# about larger ones.
MAX_PIXELS = 2**28 // 3

Shape = tuple[int, int] | None  # (height, width); None: different sizes
Side = int | tuple[int, int]  # one number stands for a square
Percent = int | float
Number = int | float


class Op(NamedTuple):
  """One parsed operation."""

  name: str
  args: tuple
  kwargs: dict[str, Any]

  @property
  def arguments(self) -> dict[str, Any]:
    """All arguments by name, including defaults."""
    bound = _signature(self.name).bind(*self.args, **self.kwargs)
    bound.apply_defaults()
    return bound.arguments

  @property
  def own(self) -> "Operation | None":
    """The operation that an import path names; None for one of `SHAPE_FNS`."""
    if self.name in SHAPE_FNS:
      return None
    return _class_of(self.name)(*self.args, **self.kwargs)

  def after(self, shape: Shape) -> Shape:
    """Returns the shape of images of this shape after the operation.

    Raises:
      TypeError, ValueError: An argument has a wrong value.
    """
    if own := self.own:
      return own.shape(shape)
    return SHAPE_FNS[self.name](shape, *self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation of one's own: a frozen dataclass, whose fields are arguments.

  Types of fields are checked, as those of a config's options; `__post_init__`
  may raise ValueError for a wrong value.

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
    raise ValueError(
      f"got size {size!r}, expected pixels such as 224 or (height, width)."
    )
  return tuple(sides)


# One function per operation, which returns the shape after the operation.


def _decode(
  shape: Shape,
  dct: str = "fast",
  upsampling: str = "fancy",
  exif: bool = True,
  background: str | None = None,
  max_pixels: int = MAX_PIXELS,
) -> Shape:
  check_choice(dct, ("fast", "accurate"), "dct")
  check_choice(upsampling, ("fancy", "plain"), "upsampling")
  if not isinstance(exif, bool):
    raise ValueError(f"exif: got {exif!r}, expected True or False.")
  check_decoding(background, max_pixels)
  return None


def _decode_inception_crop(
  shape: Shape,
  size: Side,
  area_min: Percent = 5,
  area_max: Percent = 100,
  background: str | None = None,
  max_pixels: int = MAX_PIXELS,
  method: str = "bilinear",
  antialias: bool = False,
) -> Shape:
  check_decoding(background, max_pixels)
  return _inception_crop(shape, size, area_min, area_max, method, antialias)


def check_decoding(background: str | None, max_pixels: int) -> None:
  """Checks two arguments of decoding.

  Raises:
    ValueError: The background is no colour, or max_pixels is not 1 or more.
  """
  if background is not None:
    colour(background)
  if not isinstance(max_pixels, int) or max_pixels < 1:
    raise ValueError(f"max_pixels: got {max_pixels!r}, expected 1 or more.")


def _inception_crop(
  shape: Shape,
  size: Side,
  area_min: Percent = 5,
  area_max: Percent = 100,
  method: str = "bilinear",
  antialias: bool = False,
) -> Shape:
  check_choice(method, RESIZE_METHODS, "method")
  if not 0 < area_min <= area_max <= 100:
    raise ValueError(
      f"got area_min={area_min}, area_max={area_max}, expected percent of the"
      " image's area with 0 < area_min <= area_max <= 100."
    )
  return pair(size)


def _resize(
  shape: Shape,
  size: Side,
  method: str = "bilinear",
  antialias: bool = False,
) -> Shape:
  check_choice(method, RESIZE_METHODS, "method")
  return pair(size)


def _resize_small(
  shape: Shape, size: Side, method: str = "area", antialias: bool = False
) -> Shape:
  check_choice(method, RESIZE_METHODS, "method")
  _check_shorter_side(size)
  return None


def _crop(shape: Shape, size: Side) -> Shape:
  size = pair(size)
  if shape is not None and any(a < b for a, b in zip(shape, size, strict=True)):
    raise ValueError(
      f"got size {size}, expected at most the {shape} pixels of the image."
    )
  return size


def _resize_torch(shape: Shape, size: Side, method: str = "bicubic") -> Shape:
  check_choice(method, TORCH_FILTERS, "method")
  return pair(size)


def _resize_small_torch(
  shape: Shape, size: Side, method: str = "bicubic"
) -> Shape:
  check_choice(method, TORCH_FILTERS, "method")
  _check_shorter_side(size)
  return None


def _check_shorter_side(size: Side) -> None:
  if not isinstance(size, int) or size < 1:
    raise ValueError(
      f"got size {size!r}, expected pixels of the shorter side, such as 256."
    )


def _flip_lr(shape: Shape) -> Shape:
  return shape


def _grey(shape: Shape) -> Shape:
  return shape


def _pad(shape: Shape, pixels: int, mode: str = "black") -> Shape:
  check_choice(mode, PAD_MODES, "mode")
  if not isinstance(pixels, int) or pixels < 0:
    raise ValueError(
      f"got pixels={pixels!r}, expected the pixels to add on each side."
    )
  if shape is None:
    return None
  if mode == "reflect" and pixels >= min(shape):
    raise ValueError(
      f"got pixels={pixels}, expected less than the sides {shape}."
    )
  return tuple(s + 2 * pixels for s in shape)


def _randaug(shape: Shape, num_layers: int, magnitude: int) -> Shape:
  if shape is None or min(shape) < 3:
    raise ValueError(
      f"got images of {shape or 'differing size'}, expected one size, at least"
      " 3 x 3, as after decode_inception_crop(224)."
    )
  if not isinstance(num_layers, int) or num_layers < 1:
    raise ValueError(
      f"got num_layers={num_layers!r}, expected 1 or more; to distort nothing,"
      " leave randaug out."
    )
  if not isinstance(magnitude, int) or not 0 <= magnitude <= 20:
    raise ValueError(
      f"got magnitude={magnitude!r}, expected a whole number from 0 to 20;"
      " posterize and solarize_add are not defined above 20."
    )
  return shape


def _three_augment(shape: Shape) -> Shape:
  return shape


def _color_jitter(shape: Shape, strength: Number) -> Shape:
  if not 0 <= strength <= 1:
    raise ValueError(
      f"strength: got {strength!r}, expected 0 to 1, such as 0.3."
    )
  return shape


def _randaug_timm(shape: Shape, magnitude: Number) -> Shape:
  if not 0 <= magnitude <= 10:
    raise ValueError(
      f"got magnitude={magnitude!r}, expected a mean from 0 to 10, such as 9."
    )
  return shape


def _random_erase(shape: Shape, share: Number) -> Shape:
  if shape is None:
    raise ValueError(
      "got images of differing size, expected one size, as after"
      " decode_inception_crop(224)."
    )
  if not 0 <= share <= 1:
    raise ValueError(
      f"share: got {share!r}, expected the share of images with an erased"
      " rectangle, 0 to 1, such as 0.25."
    )
  return shape


PAD_MODES = ("black", "reflect")
RESIZE_METHODS = ("bilinear", "bicubic", "area", "nearest")
TORCH_FILTERS = ("bicubic", "bilinear")

SHAPE_FNS: dict[str, Callable[..., Shape]] = {
  "decode": _decode,
  "decode_inception_crop": _decode_inception_crop,
  "inception_crop": _inception_crop,
  "resize": _resize,
  "resize_small": _resize_small,
  "central_crop": _crop,
  "resize_torch": _resize_torch,
  "resize_small_torch": _resize_small_torch,
  "central_crop_torch": _crop,
  "random_crop": _crop,
  "flip_lr": _flip_lr,
  "pad": _pad,
  "randaug": _randaug,
  "three_augment": _three_augment,
  "color_jitter": _color_jitter,
  "randaug_timm": _randaug_timm,
  "random_erase": _random_erase,
  "grey": _grey,
}


def parse_ops(text: str) -> tuple[Op, ...]:
  """Parses a string of operations.

  Raises:
    ValueError: The syntax is wrong, an operation is unknown (the message has
      the nearest known one) or does not take its arguments.

  Example:
    >>> parse_ops("decode|resize(8)")[1]
    Op(name='resize', args=(8,), kwargs={})
  """
  return tuple(_parse_op(part.strip(), text) for part in text.split("|"))


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
    raise ValueError(
      f"background: got {text!r}, expected a colour: white, black, '#ff8800'."
    ) from None


def decoding(text: str) -> dict[str, Any]:
  """Returns the arguments of `images.read` with which the operations decode.

  Raises:
    ValueError: See `parse_ops`.

  Example:
    >>> decoding("decode(background='white')|resize(8)")
    {'exif': True, 'background': 'white', 'max_pixels': 89478485}
  """
  arguments = {"exif": True} | parse_ops(text)[0].arguments
  return {k: arguments[k] for k in ("exif", "background", "max_pixels")}


def whole(text: str) -> str:
  """Returns the operation that decodes a whole image as the first one does.

  Raises:
    ValueError: See `parse_ops`.

  Example:
    >>> whole("decode_inception_crop(8, background='white')|flip_lr")
    "decode(background='white')"
  """
  known = _signature("decode").parameters
  arguments = parse_ops(text)[0].arguments
  changed = [
    f"{k}={v!r}"
    for k, v in arguments.items()
    if k in known and v != known[k].default
  ]
  return f"decode({', '.join(changed)})" if changed else "decode"


def num_crops(views: Mapping[str, View]) -> int:
  """Returns the number of crops of a record in all its views."""
  return sum(view.count or 1 for view in views.values())


def view_shapes(
  views: Mapping[str, View], channels: int
) -> dict[str, tuple[int, ...]]:
  """Returns the shape of what each view has of a record.

  Args:
    views: Views without errors.
    channels: Channels of an image.

  Example:
    >>> view_shapes({"local": View("decode|resize(8)", 3)}, 1)
    {'local': (3, 8, 8, 1)}
  """
  return {
    name: (
      *(() if view.count is None else (view.count,)),
      *image_size(view.ops),
      channels,
    )
    for name, view in views.items()
  }


def view_errors(views: Mapping[str, View]) -> Iterator[str]:
  """Yields the errors of views, each with the name of the view."""
  if not views:
    yield "got no view, expected one or more."
  decoders = {}
  for name, view in views.items():
    if name in RESERVED or not name.isidentifier():
      yield (
        f"got a view {name!r}, expected an identifier other than"
        f" {', '.join(RESERVED)}, which are other keys of a batch."
      )
    if view.count is not None and view.count < 1:
      yield f"view {name!r}: got count={view.count}, expected 1 or more."
    try:
      image_size(view.ops)
      decoders.setdefault(whole(view.ops), name)
    except ValueError as e:
      yield f"view {name!r}: {e}"
  if len(decoders) > 1:
    got = ", ".join(f"{op} in {name!r}" for op, name in decoders.items())
    yield (
      f"got views that decode differently, {got}, expected the same arguments:"
      " a record is decoded once."
    )


def with_decoding(text: str, **changes: Any) -> str:
  """Returns the operations with other arguments of decoding, the first one.

  They do not change if the first operation does not decode.

  Args:
    text: The operations.
    **changes: `background` or `max_pixels`; a default value changes nothing.

  Raises:
    ValueError: See `parse_ops`.

  Example:
    >>> with_decoding("decode(dct='accurate')|resize(8)", background="black")
    "decode(dct='accurate', background='black')|resize(8)"
  """
  first = parse_ops(text)[0]
  defaults = _signature(first.name).parameters
  changes = {
    k: v
    for k, v in changes.items()
    if k in defaults and v != defaults[k].default
  }
  if all(first.arguments[k] == v for k, v in changes.items()):
    return text
  arguments = [repr(arg) for arg in first.args]
  arguments += [f"{k}={v!r}" for k, v in (first.kwargs | changes).items()]
  _, bar, others = text.partition("|")
  return f"{first.name}({', '.join(arguments)}){bar}{others}"


def turns_upright(text: str) -> bool:
  """Whether decoding turns images by their EXIF orientation.

  Raises:
    ValueError: See `parse_ops`.
  """
  return parse_ops(text)[0].arguments.get("exif", True)


def image_size(text: str) -> tuple[int, int]:
  """Returns the (height, width) in pixels after the operations.

  Raises:
    ValueError: See `parse_ops`; or the first operation does not decode, or the
      images have different sizes at the end.

  Example:
    >>> image_size("decode|resize_small(256)|central_crop(224)")
    (224, 224)
  """
  ops = parse_ops(text)
  if any(op.name == "grey" for op in ops[:-1]):
    raise ValueError(
      f"got {text!r}, expected grey, which leaves one channel, at the end."
    )
  for i, op in enumerate(ops):
    if (op.name in ("decode", "decode_inception_crop")) != (i == 0):
      raise ValueError(
        f"got {text!r}, expected one decode or decode_inception_crop, as the"
        " first operation."
      )
  shape = shapes(text)[-1]
  if shape is None:
    raise ValueError(
      f"got {text!r}, which gives images of different sizes; add an operation"
      " that fixes the size at the end, such as resize(224)."
    )
  return shape


def channels_of(text: str) -> int:
  """Returns the number of channels of the images: 3, or 1 after `grey`."""
  return 1 if parse_ops(text)[-1].name == "grey" else 3


def for_channels(text: str, channels: int) -> str:
  """Returns the operations for a model with this number of input channels.

  Args:
    text: The operations.
    channels: 3 or 1; for 1, `grey` is added at the end.

  Raises:
    ValueError: No operation makes images with this number of channels.

  Example:
    >>> for_channels("decode|resize(8)", 1)
    'decode|resize(8)|grey'
  """
  if channels_of(text) == channels:
    return text
  if channels == 1:
    return f"{text}|grey"
  raise ValueError(
    f"got {text!r}, whose images have {channels_of(text)} channels, expected"
    f" config.model.channels={channels}; use a data loader of your own:"
    " train_and_evaluate(..., data=...)."
  )


def shapes(text: str) -> list[Shape]:
  """Returns the (height, width) after each operation; None: different sizes.

  Raises:
    ValueError: See `parse_ops`; or an argument has a wrong value.

  Example:
    >>> shapes("decode|resize(8)|pad(1)")
    [None, (8, 8), (10, 10)]
  """
  shape, after = None, []
  for op in parse_ops(text):
    try:
      shape = op.after(shape)
    except (TypeError, ValueError) as e:
      raise ValueError(f"in {op.name!r} of {text!r}: {e}") from None
    after.append(shape)
  return after


def _parse_op(part: str, text: str) -> Op:
  path, arguments = split(part)
  if is_own := is_path(part):
    part = "own" if arguments is None else f"own({arguments})"
  try:
    node = ast.parse(part, mode="eval").body
    call = node if isinstance(node, ast.Call) else None
    name = path if is_own else (call.func if call else node).id
    args = [ast.literal_eval(a) for a in call.args] if call else []
    kwargs = (
      {k.arg: ast.literal_eval(k.value) for k in call.keywords} if call else {}
    )
  except (SyntaxError, ValueError, AttributeError, TypeError):
    raise ValueError(
      f"got {part!r} in {text!r}, expected operations such as"
      " 'decode|resize(224)|flip_lr'."
    ) from None
  if not is_own and name not in SHAPE_FNS:
    raise ValueError(
      f"got unknown operation {name!r} in {text!r}, expected one of"
      f" {', '.join(SHAPE_FNS)}." + nearest(name, SHAPE_FNS)
    )
  signature = _signature(name)
  try:
    bound = signature.bind(*args, **kwargs).arguments
  except TypeError as e:
    usage = ", ".join(
      p.name + ("" if p.default is p.empty else f"={p.default!r}")
      for p in signature.parameters.values()
    )
    raise ValueError(
      f"got {part!r} in {text!r}: {e}; expected {name}({usage})."
    ) from None
  if is_own:
    types = {f.name: f.type for f in dataclasses.fields(_class_of(name))}
    for key, value in bound.items():
      parse_value(types[key], value, f"{key} of {name!r} in {text!r}")
  return Op(name, tuple(args), kwargs)


def _class_of(path: str) -> type[Operation]:
  return resolve(path, {}, "operation", Operation)


def _signature(name: str) -> inspect.Signature:
  """Returns the signature of an operation, without its argument `shape`."""
  if name not in SHAPE_FNS:
    return inspect.signature(_class_of(name))
  _, *parameters = inspect.signature(SHAPE_FNS[name]).parameters.values()
  return inspect.Signature(parameters)

"""The language of preprocessing: "decode|inception_crop(224)|flip_lr".

Operations are separated by `|`; arguments are Python literals. The operations
are those of `vit_jax.data.operations`. One's own stands there by its import
path, "decode|resize(224)|my_lab.ops:Fade(0.5)|flip_lr", see `Operation`.
Nothing here imports TensorFlow, so that errors are reported before.
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.batch import RESERVED, View
from vit_jax.data.operation import Operation, Shape
from vit_jax.data.operations import OPERATIONS
from vit_jax.names import is_path, resolve, split
from vit_jax.options import parse_value, unexpected


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
  def operation(self) -> Operation:
    """The operation with its arguments."""
    return _class_of(self.name)(*self.args, **self.kwargs)

  @property
  def is_own(self) -> bool:
    """Whether the name is an import path."""
    return self.name not in OPERATIONS


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
  decoders, has_error = set(), False
  for name, view in views.items():
    if name in RESERVED or not name.isidentifier():
      expected = f"an identifier other than {', '.join(RESERVED)}"
      yield unexpected("view", repr(name), expected)
    if view.count is not None and view.count < 1:
      yield f"view {name!r}: got count={view.count}, expected 1 or more."
    try:
      image_size(view.ops)
      decoders.add(whole(view.ops))
    except ValueError as e:
      has_error = True
      yield f"view {name!r}: {e}"
  if len(decoders) > 1:
    yield f"got views that decode differently: {', '.join(sorted(decoders))}."
  for name, view in views.items():
    if view.like is not None and not has_error:
      yield from _likeness_errors(name, view, views)


def _likeness_errors(
  name: str, view: View, views: Mapping[str, View]
) -> Iterator[str]:
  other, got = views.get(view.like), f"view {name!r}: got like={view.like!r}"
  if other is None or other.like is not None:
    names = [k for k, v in views.items() if v.like is None and k != name]
    yield f"{got}, expected one of {', '.join(names)}."
  elif other.count != view.count:
    yield f"{got} with count={other.count}, expected count={view.count}."
  else:
    draws, others = _draws(view.ops), _draws(other.ops)
    if any(others.get(position) != op for position, op in draws.items()):
      yield (
        f"{got} with {other.ops!r}, expected the random operations of"
        f" {view.ops!r} at the same positions, with the same arguments except"
        " size."
      )


def _draws(text: str) -> dict[int, tuple[str, dict[str, Any]]]:
  """Returns name and arguments, but sizes, of random operations by position."""
  return {
    position: (op.name, {k: v for k, v in op.arguments.items() if k != "size"})
    for position, op in enumerate(parse_ops(text))
    if op.operation.is_random
  }


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
    raise _error(text, "grey, which leaves one channel, at the end")
  for i, op in enumerate(ops):
    if (op.name in ("decode", "decode_inception_crop")) != (i == 0):
      raise _error(text, "decode or decode_inception_crop at the start alone")
  shape = shapes(text)[-1]
  if shape is None:
    raise _error(text, "images of one size at the end, as after resize(224)")
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
  raise _error(text, f"images of config.model.channels={channels}")


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
      shape = op.operation.shape(shape)
    except (TypeError, ValueError) as e:
      raise ValueError(f"in {op.name!r} of {text!r}: {e}") from None
    after.append(shape)
  return after


def _error(text: str, expected: str) -> ValueError:
  return ValueError(f"got {text!r}, expected {expected}.")


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
    raise _error(text, "the form 'decode|resize(224)|flip_lr'") from None
  signature = _signature(name)
  try:
    bound = signature.bind(*args, **kwargs).arguments
  except TypeError as e:
    raise ValueError(f"{part!r} of {text!r}: {e} of {name}{signature}.") from e
  if is_own:
    types = {f.name: f.type for f in dataclasses.fields(_class_of(name))}
    for key, value in bound.items():
      parse_value(types[key], value, f"{key} of {name!r} in {text!r}")
  return Op(name, tuple(args), kwargs)


def _class_of(name: str) -> type[Operation]:
  return resolve(name, OPERATIONS, "operation", Operation)


def _signature(name: str) -> inspect.Signature:
  return inspect.signature(_class_of(name))

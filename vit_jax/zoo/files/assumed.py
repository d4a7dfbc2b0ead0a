"""What no array of a file shows: an error, or an assumption with a note."""

from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.families import ModelConfig
from vit_jax.families.resnet import RESNETS
from vit_jax.families.vit import SIZES, ViTConfig
from vit_jax.weights.weights_file import POS_EMBEDDING, Weights

_OUTPUTS = {"token": "the class token", "gap": "the mean of the tokens"}
_WIDTHS = {1, 2, 3, 4}  # of published ResNets

LOST_POSITIONS = (
  f"{POS_EMBEDDING}: missing, expected a position table. Use a complete file."
  " If the model has no table: vit_jax.load(path, posemb='sincos2d') for fixed"
  " positions, posemb='none' for no positions; vit-jax convert has --posemb."
)


def lost_positions(
  params: Mapping[str, Any], options: Mapping[str, Any]
) -> bool:
  """Whether a position table may have been lost.

  Published files without a class token and without a table have fixed
  positions. With a class token, all of them have a table.

  Args:
    params: Our flat names -> anything.
    options: Options from the file and the user.
  """
  return "cls" in params and not ("posemb" in options or has_positions(params))


def has_positions(params: Mapping[str, Any]) -> bool:
  """Whether there are learned positions, in a table or in every attention."""
  ends = ("/offsets", "/relative_bias")
  return any("posembed_input/" in n or n.endswith(ends) for n in params)


def notes(
  weights: Weights, model: ModelConfig, options: Mapping[str, Any]
) -> Iterator[str]:
  """Yields a note for each assumption.

  Args:
    weights: The file, its grid and options included.
    model: The model that `identify` finds.
    options: Options from the user.
  """
  if weights.metadata:
    return
  has_units = getattr(model, "stages", None) is not None
  if has_units and weights.options.get("stage_blocks") is None:
    yield from _lost_units(model)
  if not isinstance(model, ViTConfig):
    return
  if "depth" not in options and weights.format != "hf":
    yield from _lost_blocks(model)
  if model.posemb == "sincos2d" and "posemb" not in options:
    yield (
      "the file has no table of positions: fixed ones are added, as in"
      " big_vision's files without a class token (posemb='sincos2d')."
    )
  if weights.is_bare:
    parts = []
    if model.pool in _OUTPUTS:
      parts.append(f"{_OUTPUTS[model.pool]} as output")
    if "gelu" not in options:
      parts.append(f"gelu={model.gelu!r}")
    if POS_EMBEDDING in weights.params and not weights.grid:
      parts.append("a square grid of patches (if images have no other)")
    if parts:
      yield (
        f"the file has only arrays; assumed: {', '.join(parts)}. To change"
        " this: vit_jax.load(path, gelu=..., grid=(rows, columns))."
      )


def of_head(weights: Weights) -> Iterator[str]:
  """Yields a note if nothing tells what the outputs of a head are.

  Names of classes tell it, those of a width of ImageNet included. A single
  output has a note of its own.

  Args:
    weights: The file, its classes included.
  """
  head = weights.params.get("head/kernel")
  is_silent = weights.is_bare or weights.format in ("google", "bit")
  if head is None or head.shape[-1] == 1 or not is_silent:
    return
  if weights.loss is None and weights.class_names is None:
    yield (
      "the file does not state the loss of its head: read as a softmax over"
      " classes. For another: vit_jax.load(path, loss='regression') or"
      " 'sigmoid', or the folder of the run, which states it."
    )


def _lost_blocks(model: ViTConfig) -> Iterator[str]:
  """Yields a note if a model of a known size has another number of blocks."""
  for name, size in SIZES.items():
    has = model.size
    same = ("width", "mlp_dim", "num_heads")
    if all(getattr(size, k) == getattr(has, k) for k in same):
      if size.depth != has.depth:
        yield (
          f"width {has.width}, {has.num_heads} heads and an MLP of"
          f" {has.mlp_dim} are those of {name}, which has {size.depth} blocks;"
          f" the file has {has.depth}, and no array tells whether the last ones"
          f" are lost. depth={has.depth} states that it is whole."
        )
      return


def _lost_units(model: ModelConfig) -> Iterator[str]:
  """Yields a note if a published ResNet of this width has more units."""
  has, width = model.stages
  is_hybrid, larger = isinstance(model, ViTConfig), []
  for depth, units in RESNETS.items():
    if is_hybrid and len(has) == 3:  # R50+B/16 has (3, 4, 9)
      units = (*units[:2], units[2] + units[3])
    if len(units) == len(has) and all(map(int.__le__, has, units)):
      larger.append((sum(units), depth, units))
  if not larger or width not in _WIDTHS:
    return
  _, depth, units = min(larger)
  if units != has:
    name = f"R{depth}" if is_hybrid else f"R{depth}x{width:g}"
    yield (
      f"the nearest ResNet of this width is {name}, which has {units} units in"
      f" its stages; the file has {has}, and no array tells whether the last"
      f" ones are lost. stage_blocks={has} states that it is whole."
    )

"""What no array of a file shows: an error, or an assumption with a note."""

from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.families import ModelConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.weights.weights_file import POS_EMBEDDING, Weights

_OUTPUTS = {"token": "the class token", "gap": "the mean of the tokens"}

LOST_POSITIONS = (
  f"{POS_EMBEDDING}: missing, expected a position table, or posemb='sincos2d'"
  " (fixed positions) or posemb='none' stated."
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
  """Yields a note for each assumption about a Transformer.

  Args:
    weights: The file, its grid and options included.
    model: The model that `identify` finds.
    options: Options from the user.
  """
  if weights.metadata or not isinstance(model, ViTConfig):
    return
  if model.posemb == "sincos2d" and "posemb" not in options:
    yield "no table of positions: posemb='sincos2d', as in big_vision's files."
  if weights.assumes_heads:
    yield (
      "nothing states the number of attention heads; assumed: num_heads="
      f"{model.size.num_heads}, that of the known model of this size. Another"
      " number gives other outputs without an error: vit_jax.load(path,"
      " num_heads=...), vit-jax convert --num_heads, and for training"
      " --config.model.num_heads."
    )
  if not weights.is_bare:
    return
  parts = []
  if model.pool in _OUTPUTS:
    parts.append(f"{_OUTPUTS[model.pool]} as output")
  if "gelu" not in options:
    parts.append(f"gelu={model.gelu!r}")
  if POS_EMBEDDING in weights.params and not weights.grid:
    parts.append("a square grid of patches (if images have no other)")
  if parts:
    yield (
      f"the file has only arrays; assumed: {', '.join(parts)}. To change this:"
      " vit_jax.load(path, gelu=..., grid=(rows, columns))."
    )


def of_head(weights: Weights) -> Iterator[str]:
  """Yields a note if nothing states what the outputs of a head are.

  Names of classes state it, those of a width of ImageNet included. A single
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

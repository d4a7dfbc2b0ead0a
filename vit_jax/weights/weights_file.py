"""A file of weights: lazy arrays, and metadata."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.config import (
  ConfigError,
  ModelConfig,
  json_file,
  model_from_dict,
)
from vit_jax.config.from_dict import at_least
from vit_jax.families.vit import ViTConfig
from vit_jax.losses import HEADS
from vit_jax.options import check_choice, shown

POS_EMBEDDING = "Transformer/posembed_input/pos_embedding"
EXPECTED = (
  "expected a .npz of Google's, a .safetensors or .pth of timm, Meta or"
  " OpenCLIP, or the folder of a Hugging Face model or of one of our runs, see"
  " docs/weights.md"
)
METADATA_KEY = "vit_jax"  # in the header of .safetensors files that we write
TORCH_BIN = "pytorch_model.bin"  # in a folder of transformers
TORCH_INDEX = f"{TORCH_BIN}.index.json"
MOST_NAMED = 6  # arrays in a message


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """An array in a file with a known shape; `np.asarray` reads it.

  Every use reads it again. So a file of any size needs the memory of one array
  at a time.

  Attributes:
    shape: Shape of the result of `read`.
    dtype: Type of the result of `read`.
    read: Returns the array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    array = np.asarray(self.read())
    assert array.shape == self.shape, (array.shape, self.shape)
    return array if dtype is None else array.astype(dtype, copy=False)

  def then(
    self,
    shape: tuple[int, ...],
    change: Callable[[np.ndarray], np.ndarray],
  ) -> "LazyArray":
    """Returns the lazy array of `change(array)`, which must have that shape."""
    return LazyArray(shape, self.dtype, lambda: change(np.asarray(self)))


def lazy(array: np.ndarray) -> LazyArray:
  """Wraps an array that is already in memory."""
  return LazyArray(np.shape(array), array.dtype, lambda: array)


class StateDict(NamedTuple):
  """Arrays under a PyTorch library's names, and what is beside them.

  path: The file, or its folder.
  arrays: The arrays by name.
  metadata: Texts in the file's header.
  config: Contents of the config.json beside it; {} without such a file.
  options: Options of the model from the caller.
  """

  path: epath.Path
  arrays: dict[str, LazyArray]
  metadata: Mapping[str, str]
  config: dict[str, Any]
  options: Mapping[str, Any]


class Pixels(NamedTuple):
  """Normalisation of images: the model got (p - mean) / std of p in [0, 1].

  One number for each channel, or equal numbers for any number of channels.
  Images in [-1, 1] have mean 0.5 and std 0.5; images in 0 to 255 have mean 0
  and std 1 / 255.
  """

  mean: tuple[float, ...]
  std: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Preprocessing:
  ops: str | None = None


@dataclasses.dataclass(frozen=True)
class _Objective:
  loss: Any = None  # of the head, in old files


@dataclasses.dataclass(frozen=True)
class _Config:
  model: dict = dataclasses.field(default_factory=dict)
  objective: _Objective = _Objective()


@dataclasses.dataclass(frozen=True)
class _Standardisation:
  mean: tuple[float, ...] = ()
  deviation: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Metadata:
  """The part of a checkpoint's metadata that is read; sizes in pixels."""

  model: dict = dataclasses.field(default_factory=dict)
  config: _Config = _Config()
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = at_least(1)
  grid: tuple[int, int] | None = at_least(1)
  preprocessing: _Preprocessing = _Preprocessing()
  loss: str | None = None
  standardisation: _Standardisation = _Standardisation()
  posemb_filter: str | None = None
  objective_parameters: str | None = None


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters under our names, and what the file states about them.

  Attributes:
    path: The file or folder.
    format: "google", "bit", "timm" (also Meta's), "hf", "openclip" or
      "checkpoint".
    params: Flat, "a/b/c" -> lazy array; blocks not stacked.
    options: Options of the model (fields of its family) that the file or its
      format states, and that do not follow from names and shapes.
    grid: The (rows, columns) of patches of the position table; None if unknown.
    has_cls_row: Whether row 0 of that table is the class token's.
    image_size: (height, width) in pixels; None if unknown.
    class_names: Names in the order of the logits, or None.
    ops: Preprocessing, as `config.data.ops`; None if unknown.
    crop_share: Side of its crop / shorter side of the image, not rounded; None
      if unknown.
    loss: Training loss of the head, one of `losses.HEADS`; None if unknown. The
      outputs of a regression are numbers in the data's units.
    pixels: Normalisation of images; None if it is not stated.
    published_pixels: The name in `normalisation.NAMED` of the normalisation
      that is then assumed, because the publishers of such arrays use it, with a
      note. None if the arrays belong to no known series.
    posemb_filter: How positions are resized for images of another size, a name
      of `models.resample.METHODS`, unless the user chooses one. None if neither
      the file nor its format states it; then `read` takes that of the authors,
      `publishers.posemb_filter`.
    is_bare: Whether only the arrays describe the model, in a format whose
      models differ.
    assumes_heads: Whether nothing states the number of attention heads, so that
      it is that of the known model of the same size.
    notes: Facts for the user.
    metadata: Everything else in a checkpoint's metadata.
  """

  path: str
  format: str
  params: dict[str, LazyArray]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  grid: tuple[int, int] | None = None
  has_cls_row: bool = False
  image_size: tuple[int, int] | None = None
  class_names: tuple[str, ...] | None = None
  ops: str | None = None
  crop_share: float | None = None
  loss: str | None = None
  pixels: Pixels | None = None
  published_pixels: str | None = None
  posemb_filter: str | None = None
  is_bare: bool = False
  assumes_heads: bool = False
  notes: tuple[str, ...] = ()
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def num_class_rows(self) -> int:
    """Number of leading rows of the table, for class and distillation token."""
    return self.has_cls_row * (1 + ("dist" in self.params))

  def class_rows(self, model: ModelConfig) -> int:
    """Returns the number of leading rows of the table for class tokens.

    Args:
      model: The model of the file. Only our Transformers have files with and
        without these rows.
    """
    is_ours = isinstance(model, ViTConfig)
    return self.num_class_rows if is_ours else model.num_class_rows


def without_head(weights: Weights, model: ModelConfig) -> Weights:
  """Returns weights for a run whose head has outputs of another meaning."""
  params = {k: v for k, v in weights.params.items() if not model.is_head(k)}
  note = "the head is not loaded: a regression and classes share none."
  notes = (*weights.notes, note) if len(params) < len(weights.params) else ()
  return dataclasses.replace(
    weights, params=params, notes=notes or weights.notes
  )


def shorten(names: Sequence[str]) -> str:
  """Returns "'a', 'b' and 3 more", with the first `MOST_NAMED`."""
  text = ", ".join(repr(n) for n in names[:MOST_NAMED])
  rest = len(names) - MOST_NAMED
  return f"{text} and {rest} more" if rest > 0 else text


def has_row_of_class(num_rows: int, grid: tuple[int, int] | None) -> bool:
  """Whether a table beside a class token has a row for it, by its length.

  n and n + 1 are never both squares, so the table of a square grid decides by
  itself. FlexiViT's has no such row, although it has a class token.
  """
  if grid is not None:
    return num_rows != math.prod(grid)
  return math.isqrt(num_rows) ** 2 != num_rows


def unknown_names(path: Any, arrays: Mapping[str, Any]) -> str:
  """Returns an error for the arrays of a file that no reader knows."""
  some = shorten(sorted(arrays)) or "none"
  return f"got {str(path)!r} with arrays of no known model: {some}; {EXPECTED}."


def height_and_width(sides: tuple[int, ...], where: str) -> tuple[int, int]:
  """Returns a size that is given as one side or as two.

  Raises:
    ValueError: It has another number of sides; the message names `where`.
  """
  if len(sides) not in (1, 2):
    raise ValueError(f"{where}: got {shown(sides)}, expected one side or two.")
  return sides[0], sides[-1]


def _in_units(
  params: dict[str, LazyArray], of: _Standardisation, model: ModelConfig
) -> dict[str, LazyArray]:
  """Returns parameters whose head predicts numbers in the data's units."""
  if not of.mean:
    return params
  mean, deviation = (np.array(v, np.float32) for v in (of.mean, of.deviation))
  new = {}
  for path in filter(model.is_head, params):
    shift = mean if path.endswith("/bias") else 0
    array = params[path]
    new[path] = array.then(
      array.shape, lambda a, shift=shift: a * deviation + shift
    )
  return params | new


def metadata_of(file: StateDict) -> dict[str, Any]:
  """Returns the metadata that vit_jax wrote into a header; {} if it did not.

  Raises:
    ValueError: They are damaged.
  """
  where = f"{file.path}: {METADATA_KEY} in its header"
  ours = json_file.parse(file.metadata.get(METADATA_KEY, "{}"), where)
  json_file.build(Metadata, ours, where)
  return ours


def model_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the model's options in the metadata, or None."""
  config = metadata.get("config")  # another program's may be of any type
  stated = config.get("model") if isinstance(config, dict) else None
  return metadata.get("model") or stated


def num_heads_of(metadata: Mapping[str, Any]) -> int | None:
  """Returns the number of heads of a Transformer's metadata, or None."""
  if not (stated := model_of(metadata)):
    return None
  model = model_from_dict(stated)
  return model.size.num_heads if isinstance(model, ViTConfig) else None


def with_metadata(weights: Weights, metadata: Mapping[str, Any]) -> Weights:
  """Adds the metadata that vit_jax wrote beside the parameters.

  Raises:
    ValueError: They are damaged: values have other types.
  """
  stated = json_file.build(Metadata, metadata, f"{weights.path}: metadata")
  try:
    model = model_from_dict(stated.model or stated.config.model)
  except ConfigError as e:
    raise ValueError(f"metadata: {' '.join(e.errors)}") from None
  options, notes = dataclasses.asdict(model), weights.notes
  if (
    isinstance(model, ViTConfig)
    and POS_EMBEDDING in weights.params
    and options.get("posemb", "learn") != "learn"
  ):
    # timm has no fixed positions: they are written as a learned table.
    notes += (f"posemb={options['posemb']} is a learned table of its values.",)
    options |= {"posemb": "learn", "cls_row": False}
  loss = stated.loss
  if "loss" not in metadata:  # it was only in the config
    loss = stated.config.objective.loss
  check_choice(loss, HEADS, "metadata: loss")
  return dataclasses.replace(
    weights,
    params=_in_units(weights.params, stated.standardisation, model),
    options=options,
    grid=stated.grid,
    image_size=stated.image_size,
    class_names=stated.class_names or None,
    ops=stated.preprocessing.ops,
    loss=loss,
    pixels=Pixels((0.5,) * 3, (0.5,) * 3),
    posemb_filter=stated.posemb_filter or weights.posemb_filter,
    notes=notes,
  )

"""Reads weights of any known format, recognised by the content of the file.

A new format is a module with `looks_like` and `read`, and a line in `NPZ` or
`STATE_DICTS`.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import class_names
from vit_jax.config import json_file
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import adapters
from vit_jax.losses import REGRESSION
from vit_jax.paths import file_in
from vit_jax.weights import bit, download, google, normalisation
from vit_jax.weights.identify import (
  NEEDED,
  RECOGNISED,
  identify,
  num_classes,
  stated_model,
)
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.safetensors_file import INDEX, LINE, open_safetensors
from vit_jax.weights.weights_file import (
  EXPECTED,
  POS_EMBEDDING,
  LazyArray,
  StateDict,
  Weights,
  lazy,
  model_of,
  with_metadata,
)
from vit_jax.zoo.files import (
  assumed,
  hf,
  hf_names,
  openclip,
  others,
  peft,
  publishers,
  timm,
  timm_file,
  torch_file,
  wrappers,
)
from vit_jax.zoo.files.torch_layout import shorten


class NpzFormat(NamedTuple):
  """A set of names that the arrays of a `.npz` may have.

  looks_like: Whether names are of this format.
  read: Arrays by these names -> arrays by our flat names, and options of the
    model that follow from the format.
  """

  looks_like: Callable[[Iterable[str]], bool]
  read: Callable[
    [dict[str, LazyArray]], tuple[dict[str, LazyArray], dict[str, Any]]
  ]


class StateDictFormat(NamedTuple):
  """A set of names that the arrays of a `.safetensors` or `.pth` may have.

  looks_like: Whether names are of this format.
  read: A file with these names -> its weights.
  """

  looks_like: Callable[[Iterable[str]], bool]
  read: Callable[[StateDict], Weights]


# The first format that knows the names reads the file.
NPZ = {
  "bit": NpzFormat(bit.looks_like, bit.read),
  "google": NpzFormat(google.looks_like, google.read),
}
STATE_DICTS = {
  "timm": StateDictFormat(timm.looks_like, timm_file.read),
  "hf": StateDictFormat(hf_names.looks_like, hf.read),
  "openclip": StateDictFormat(openclip.looks_like, openclip.read),
}

# Number of dimensions of the arrays whose shapes decide the model.
RANKS = {
  "cls": 3,
  POS_EMBEDDING: 3,
  POS_EMBEDDING + "_x": 3,
  POS_EMBEDDING + "_y": 3,
  "conv_root/kernel": 4,
  "embedding/kernel": 4,
  "head/kernel": 2,
  **NEEDED,
}


def read(
  path: str | os.PathLike,
  *,
  grid: tuple[int, int] | None = None,
  options: Mapping[str, Any] | None = None,
  mean: normalisation.Statement = None,
  std: normalisation.Statement = None,
) -> Weights:
  """Reads weights of any known format; arrays are lazy.

  Args:
    path: See `EXPECTED`, on disk or wherever `epath` reads (gs://); or an
      address that `download.local` downloads: https://...,
      hf-hub:OWNER/NAME[@REV].
    grid: Rows and columns of patches of the position table, for a file that
      does not state them and whose grid is not square.
    options: Options of the model that have precedence over the file's, such as
      cls_row, or num_heads for a timm file of an unknown size.
    mean, std: Normalisation of the images in training, see
      `normalisation.stated`; None for the file's. If it has none, that of the
      publishers of such arrays is assumed, or 0.5 and 0.5, with a note.

  Raises:
    FileNotFoundError: The path does not exist.
    ValueError: The format is unknown or unsafe, the file is damaged, or mean or
      std is not valid.
  """
  stated = normalisation.stated(mean, std)
  file, options = download.local(path), dict(options or {})
  if not file.exists():
    raise FileNotFoundError(
      f"got {str(path)!r}, which does not exist; {EXPECTED}, or"
      f" an address: https://..., {download.HUB}OWNER/NAME."
    )
  read_path = _read_folder if file.is_dir() else _read_file
  try:
    if peft.is_adapter(file):
      about_base = dict(grid=grid, options=options, mean=mean, std=std)
      weights = peft.read(file, functools.partial(read, **about_base))
    else:
      weights = read_path(file, options)
      _check_arrays(weights.params)
      is_unstated = weights.pixels is None
      if stated is not None:
        weights = dataclasses.replace(weights, pixels=stated)
      weights = _with_grid(weights, grid, options)
      if is_unstated:
        weights = publishers.assume(weights)
      weights = _with_assumptions(normalisation.fold(weights), options)
    if weights.posemb_filter is None:
      chosen = publishers.posemb_filter(weights)
      weights = dataclasses.replace(weights, posemb_filter=chosen)
  except ValueError as e:
    if download.is_remote(path):
      # A snapshot of the hub has links; the files are beside its parent.
      is_snapshot = str(path).startswith(download.HUB)
      place = file.parent.parent if is_snapshot else file
      raise ValueError(
        f"{path}: {e} It was downloaded; delete {place} to fetch it again."
      ) from None
    if str(path) in str(e):
      raise
    raise ValueError(f"{path}: {e}") from None
  return _with_classes(dataclasses.replace(weights, path=str(path)))


def _with_grid(
  weights: Weights,
  grid: tuple[int, int] | None,
  given: Mapping[str, Any],
) -> Weights:
  """Adds the caller's arguments, and whether the table has a row for cls.

  Args:
    weights: Weights as their format gives them.
    grid: Rows and columns of the position table, or None.
    given: Options from the caller.
  """
  grid = grid or weights.grid
  if weights.format == "timm":
    weights = _without_rows_of_registers(weights, grid)
  params, options = weights.params, weights.options | given
  tables = {_without_block(name): a.shape for name, a in params.items()}
  has_cls_row = "cls" in params and POS_EMBEDDING in tables
  if has_cls_row and "cls_row" not in options:
    if not _has_row_of_class(tables[POS_EMBEDDING][1], grid):
      options["cls_row"] = False
  has_cls_row = has_cls_row and options.get("cls_row", True)
  return dataclasses.replace(
    weights, grid=grid, options=options, has_cls_row=has_cls_row
  )


def _without_rows_of_registers(
  weights: Weights, grid: tuple[int, int] | None
) -> Weights:
  """Adds the positions of registers and class token to these tokens.

  timm's tables have rows for both or, if no_embed_class is True, for neither.

  Args:
    weights: Weights of timm's or Meta's.
    grid: Rows and columns of the position table, or None.
  """
  params, table = weights.params, weights.params.get(POS_EMBEDDING)
  if "registers" not in params or table is None:
    return weights
  num_rows, ends = table.shape[1], [0]
  tokens = [name for name in ("cls", "registers") if name in params]
  for name in tokens:
    ends.append(ends[-1] + params[name].shape[1])
  others = [n for n in ends if n < num_rows]
  fits = [n for n in others if not _has_row_of_class(num_rows - n, grid)]
  widths = {params[name].shape[2] for name in tokens}
  if fits != ends[-1:] or widths != {table.shape[2]}:
    return weights
  new = {POS_EMBEDDING: _sum_of(table, None, ends[-1], num_rows)}
  for name, start, end in zip(tokens, ends[:-1], ends[1:], strict=True):
    new[name] = _sum_of(table, params[name], start, end)
  note = (
    f"the position table of {num_rows} rows has {ends[-1]} for"
    f" {' and '.join(tokens)}, which were added to their values."
  )
  notes = (*weights.notes, note)
  return dataclasses.replace(weights, params=params | new, notes=notes)


def _sum_of(
  table: LazyArray, tokens: LazyArray | None, start: int, end: int
) -> LazyArray:
  """Returns rows of a table, plus the tokens at these positions."""

  def read() -> np.ndarray:
    rows = np.asarray(table, np.float32)[:, start:end]
    return rows if tokens is None else rows + np.asarray(tokens, np.float32)

  shape = (table.shape[0], end - start, table.shape[2])
  return LazyArray(shape, np.dtype(np.float32), read)


def _with_assumptions(weights: Weights, given: Mapping[str, Any]) -> Weights:
  """Adds notes on assumptions.

  Args:
    weights: Weights with the caller's arguments.
    given: Options from the caller.

  Raises:
    ValueError: The arrays fit no model, or an array that they lack may be lost.
  """
  params, options = weights.params, weights.options
  needed = {"embedding/kernel", *NEEDED}
  if not (needed <= params.keys() or google.RESNET_NAMES <= params.keys()):
    return weights  # neither a Transformer nor a ResNet, or none that is whole
  if assumed.lost_positions(params, options):
    raise ValueError(assumed.LOST_POSITIONS)
  notes = assumed.notes(weights, identify(params, options), given)
  return dataclasses.replace(weights, notes=(*weights.notes, *notes))


def _has_row_of_class(num_rows: int, grid: tuple[int, int] | None) -> bool:
  """Whether a table beside a class token has a row for it, by its length.

  n and n + 1 are never both squares, so the table of a square grid decides by
  itself. FlexiViT's has no such row, although it has a class token.
  """
  if grid is not None:
    return num_rows != math.prod(grid)
  return math.isqrt(num_rows) ** 2 != num_rows


def _with_classes(weights: Weights) -> Weights:
  """Adds class names and loss that follow from the width of the head."""
  if not (width := num_classes(weights.params, stated_model(weights.options))):
    return weights
  names, notes = weights.class_names, weights.notes
  if names is not None and len(names) != width:
    note = f"got {len(names)} names for a head of {width} classes: left out."
    names, notes = None, (*notes, note)
  is_ours = weights.format == "checkpoint"
  if names is None and not is_ours and weights.loss != REGRESSION:
    names = class_names.known(width)
    if sentence := class_names.describe(width):
      notes = (*notes, sentence)
  if width == 1 and weights.loss is None:
    notes += (
      "the head has one output, which a softmax makes 1 for every image;"
      " vit_jax.load(path, loss='sigmoid') reads it as a probability,"
      " loss='regression' as a number.",
    )
  is_vit = "embedding/kernel" in weights.params
  loss = weights.loss or class_names.published_loss(width, is_vit)
  return dataclasses.replace(weights, class_names=names, loss=loss, notes=notes)


def _read_file(file: epath.Path, options: dict[str, Any]) -> Weights:
  if file.name == INDEX:
    return _read_safetensors(file.parent, file, options)
  if file.name == torch_file.INDEX:
    return _read_torch(file.parent, file, options)
  with file.open("rb") as stream:
    head = stream.read(512)
  if torch_file.is_torch(file, head):
    return _read_torch(file, file, options)
  if head[:2] == b"PK":
    arrays, notes = google.averaged(open_npz(file))
    for name, (looks_like, read_arrays) in NPZ.items():
      if looks_like(arrays):
        params, stated = read_arrays(arrays)
        # Publishers of these formats have images in [-1, 1].
        pixels, texts = normalisation.HALF, google.left_out(arrays)
        if texts:
          notes.append(f"left out: {shorten(texts)}, which only texts need.")
        return Weights(
          str(file), name, params, stated, pixels=pixels, notes=tuple(notes)
        )
    if not arrays:
      if what := others.ZIPS.get(file.suffix):
        raise ValueError(f"got {str(file)!r}, which {what}.")
      raise ValueError(
        f"got {str(file)!r}, a zip without arrays (.npy) in it; unpack it, and"
        f" give the model's file or folder: {EXPECTED}."
      )
    raise ValueError(_unknown_names(file, arrays))
  if head[8:9] == b"{":
    return _read_safetensors(file, file, options)
  if what := others.kind_of(head):
    raise ValueError(f"got {str(file)!r}, which {what}.")
  raise ValueError(
    f"got {str(file)!r}, which is neither .npz nor .safetensors"
    f"{' but empty' if not head else ''}; {EXPECTED}."
  )


def _read_folder(folder: epath.Path, options: dict[str, Any]) -> Weights:
  for name in ("model.safetensors", INDEX):
    if (folder / name).exists():
      return _read_safetensors(folder, file_in(folder, name), options)
  for name in (torch_file.BIN, torch_file.INDEX):
    if (folder / name).exists():
      return _read_torch(folder, file_in(folder, name), options)
  files = sorted(p.name for p in folder.glob("*.safetensors"))
  if len(files) == 1 and files[0] != others.ADAPTER:  # model.fp16.safetensors
    return _read_safetensors(folder, file_in(folder, files[0]), options)
  for index in (INDEX, torch_file.INDEX):
    stem, suffix = index.removesuffix(".index.json").split(".")
    if parts := [p.name for p in folder.glob(f"{stem}-*-of-*.{suffix}")]:
      raise ValueError(
        f"got {str(folder)!r} with parts of a model ({min(parts)}, ...) and"
        f" without their index, expected {index} beside them."
      )
  if error := others.of_folder(folder):
    raise ValueError(error)
  if files:
    raise ValueError(
      f"got {str(folder)!r} with {', '.join(files[:9])}, expected the path of"
      " one of them, or model.safetensors."
    )
  weights = read_checkpoint(folder)
  if adapters.is_on_base(weights.metadata):
    return adapters.on_base(weights, read)
  return weights


def read_checkpoint(folder: epath.Path) -> Weights:
  """Reads a tree of arrays written by Orbax, and our metadata if there are any.

  Adapters are not merged.

  Raises:
    FileNotFoundError, ValueError: As `read`.
  """
  from vit_jax.checkpointing import checkpointer  # other files need no Orbax

  nested, metadata = checkpointer.load_tree(str(folder))
  names = flax.traverse_util.flatten_dict(nested).items()
  averaged, notes = google.averaged(
    {"/".join(map(str, k)): v for k, v in names}
  )
  if notes:
    nested = averaged
  for key in ("state", "model"):  # of a training state
    if isinstance(nested.get(key), dict) and "params" in nested[key]:
      nested = nested[key]
  if isinstance(nested.get("params"), dict):
    nested = nested["params"]
  flat = flax.traverse_util.flatten_dict(nested, sep="/")
  if other := [k for k, v in flat.items() if not hasattr(v, "shape")]:
    raise ValueError(
      f"got a checkpoint with {other[0]!r}, which is no array; {EXPECTED}."
    )
  params, stated = {k: lazy(np.asarray(v)) for k, v in flat.items()}, {}
  is_known = isinstance(metadata, dict) and model_of(metadata)
  name = is_known and is_known.get("name", "vit")
  if not is_known or name in RECOGNISED:  # other families have their own names
    params, stated = google.read(params)
  weights = Weights(
    str(folder), "checkpoint", params, notes=tuple(notes), metadata=metadata
  )
  if not is_known:
    # Another program's.
    return dataclasses.replace(
      weights, options=stated, metadata={}, is_bare=True
    )
  # Before metadata had the filter, it was the paper's.
  weights = dataclasses.replace(weights, posemb_filter="zoom")
  return with_metadata(weights, metadata)


def _read_safetensors(
  path: epath.Path, file: epath.Path, options: dict[str, Any]
) -> Weights:
  """Reads a `.safetensors`, or several by their index.

  Args:
    path: The user's path: the file, or its folder.
    file: The file, or the index.
    options: Options from the user.
  """
  arrays, metadata = open_safetensors(file)
  config = json_file.read(file_in(file.parent, "config.json"))
  parts = StateDict(path, arrays, metadata, config, options)
  return _read_state_dict(parts, LINE)


def _read_torch(
  path: epath.Path, file: epath.Path, options: dict[str, Any]
) -> Weights:
  """Reads a file of torch.save, or several by their index; see above."""
  arrays, metadata, notes, line = torch_file.open_torch(file)
  config = json_file.read(file_in(file.parent, "config.json"))
  parts = StateDict(path, arrays, metadata, config, options)
  weights = _read_state_dict(parts, line)
  return dataclasses.replace(weights, notes=(*notes, *weights.notes))


def _read_state_dict(file: StateDict, line: str) -> Weights:
  others.refuse_quantised(file.arrays)
  openclip.refuse_head(file.arrays, line)
  arrays, notes = wrappers.unwrapped(file.arrays, line)
  for looks_like, read_file in STATE_DICTS.values():
    if looks_like(arrays):
      if read_file is timm_file.read and openclip.has_trunk(file.arrays):
        read_file = openclip.read_trunk
      weights = read_file(file._replace(arrays=arrays))
      return dataclasses.replace(weights, notes=(*notes, *weights.notes))
  raise ValueError(_unknown_names(file.path, arrays, file.config))


def _unknown_names(
  path: epath.Path,
  arrays: dict[str, LazyArray],
  config: Mapping[str, Any] | None = None,
) -> str:
  some = ", ".join(sorted(arrays)[:4]) or "none"
  family = others.family_of(arrays, config or {})
  return (
    f"got {str(path)!r} with {len(arrays)} arrays, such as {some}, of no model"
    f" that vit_jax knows{f': {family}' if family else ''}; {EXPECTED}."
  )


def _check_arrays(params: Mapping[str, LazyArray]) -> None:
  for name, array in params.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(
        f"{name}: got type {array.dtype}, expected floating point."
      )
    known = RANKS.get(name) or RANKS.get(_without_block(name))
    rank = known or len(array.shape)
    if len(array.shape) != rank:
      raise ValueError(
        f"{name}: got shape {tuple(array.shape)}, expected {rank} dimensions."
      )


def _without_block(name: str) -> str:
  """Returns the name of a block's position table as if it were the stem's."""
  if ViTConfig.block_of(name) is None:
    return name
  encoder, _, inner = name.split("/", 2)
  return f"{encoder}/{inner}"

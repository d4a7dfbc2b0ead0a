"""Reads weights of any known format, recognised by the content of the file.

The formats of this codebase and of Google's are read here. The readers of other
libraries' formats, `vit_jax.zoo.files`, are imported when a file is theirs.
"""

import dataclasses
import functools
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import class_names
from vit_jax.config import json_file
from vit_jax.families.vit import ViTConfig
from vit_jax.losses import REGRESSION
from vit_jax.paths import file_in
from vit_jax.weights import assumptions, bit, download, google, normalisation
from vit_jax.weights.fitting import PUBLISHED
from vit_jax.weights.identification import (
  NEEDED,
  RECOGNISED,
  has_modern_parts,
  identify,
  num_classes,
  stated_model,
)
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.safetensors_file import INDEX, open_safetensors
from vit_jax.weights.weights_file import (
  EXPECTED,
  POS_EMBEDDING,
  TORCH_BIN,
  TORCH_INDEX,
  LazyArray,
  StateDict,
  Weights,
  has_row_of_class,
  lazy,
  model_of,
  shorten,
  unknown_names,
  with_metadata,
)

# Formats of .npz; the first one that knows the names reads the file.
NPZ = {
  "bit": bit,
  "google": google,
}
# Files of an adapter of peft, in one folder.
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # before torch 1.6

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
      f"got {str(path)!r}, which does not exist; {EXPECTED}."
      f"{download.hub_hint(path)}"
    )
  read_path = _read_folder if file.is_dir() else _read_file
  try:
    if all((file / name).exists() for name in ADAPTER):
      from vit_jax.zoo.files import peft

      about_base = dict(grid=grid, options=options, mean=mean, std=std)
      weights = peft.read(file, functools.partial(read, **about_base))
    else:
      weights = read_path(file, options)
      _check_arrays(weights.params)
      is_unstated = weights.pixels is None
      if stated is not None:
        weights = dataclasses.replace(weights, pixels=stated)
      weights = _with_grid(weights, grid, options)
      if is_unstated and not _is_of_google(weights):
        from vit_jax.zoo.files import publishers

        weights = publishers.assume(weights)
      weights = _with_assumptions(normalisation.fold(weights), options)
    if weights.posemb_filter is None:
      chosen = "zoom"
      if not _is_of_google(weights):
        from vit_jax.zoo.files import publishers

        chosen = publishers.posemb_filter(weights)
      weights = dataclasses.replace(weights, posemb_filter=chosen)
  except ValueError as e:
    if download.is_remote(path):
      # A snapshot of the hub has links; the files are beside its parent.
      is_snapshot = str(path).startswith(download.HUB)
      place = file.parent.parent if is_snapshot else file
      e = f"{e} To fetch it again: delete {place}."
      raise ValueError(f"{path}: {e}") from None
    if str(path) in str(e):
      raise
    raise ValueError(f"{path}: {e}") from None
  notes, text = weights.notes, str(path)
  if text.startswith(download.HUB) and "@" not in text:
    notes += (f"to load this revision later: {text}@{file.name}",)
  return _with_classes(dataclasses.replace(weights, path=text, notes=notes))


def read_shapes(path: str | os.PathLike) -> Weights:
  """As `read`, for a config file: of a run, only what its arrays are.

  Orbax starts jax to read arrays. But a config is read before the processes of
  its run have joined, and jax must not start before.

  Args:
    path: As for `read`. The arrays of a run of this codebase have shapes and
      types, but cannot be read; a run of adapters is read with its base.

  Raises:
    FileNotFoundError, ValueError: As `read`.
  """
  from vit_jax.checkpointing import checkpointer  # other files need no Orbax
  from vit_jax.finetune import lora_base

  if (folder := download.local(path)).is_dir():
    try:
      digests = checkpointer.digests(str(folder))["params"]
      metadata = checkpointer.load_metadata(str(folder))
    except (FileNotFoundError, ValueError):  # of others; or `read` says what is
      return read(path)
    if model_of(metadata) and not lora_base.is_on_base(metadata):
      arrays = {
        name: LazyArray(digest.shape, np.dtype(digest.dtype), _is_not_read)
        for name, digest in digests.items()
      }
      weights = _of_checkpoint(folder, arrays, metadata, [])
      return dataclasses.replace(weights, path=str(path))
  return read(path)


def _is_not_read() -> np.ndarray:
  raise TypeError("only the shapes of these arrays are known")


def _is_of_google(weights: Weights) -> bool:
  """Whether images and positions are those of the paper's models."""
  is_modern = weights.options.get("name") == "modern"
  is_modern = is_modern or has_modern_parts(weights.params)
  return weights.format in PUBLISHED and not is_modern


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
    from vit_jax.zoo.files import timm

    weights = timm.without_rows_of_registers(weights, grid)
  params, options = weights.params, weights.options | given
  tables = {_without_block(name): a.shape for name, a in params.items()}
  has_cls_row = "cls" in params and POS_EMBEDDING in tables
  if has_cls_row and "cls_row" not in options:
    if not has_row_of_class(tables[POS_EMBEDDING][1], grid):
      options["cls_row"] = False
  has_cls_row = has_cls_row and options.get("cls_row", True)
  return dataclasses.replace(
    weights, grid=grid, options=options, has_cls_row=has_cls_row
  )


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
  if assumptions.lost_positions(params, options):
    raise ValueError(assumptions.LOST_POSITIONS)
  notes = assumptions.notes(weights, identify(params, options), given)
  return dataclasses.replace(weights, notes=(*weights.notes, *notes))


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
    notes += ("the softmax of one output is 1: state loss='sigmoid' or other.",)
  is_vit = "embedding/kernel" in weights.params
  loss = weights.loss or class_names.published_loss(width, is_vit)
  return dataclasses.replace(weights, class_names=names, loss=loss, notes=notes)


def _read_file(file: epath.Path, options: dict[str, Any]) -> Weights:
  if file.name in (INDEX, TORCH_INDEX):
    return _read_state_dict(file.parent, file, options)
  with file.open("rb") as stream:
    head = stream.read(512)
  if (is_torch := _is_torch(file, head)) or head[8:9] == b"{":
    return _read_state_dict(file, file, options, is_torch)
  if head[:2] != b"PK":
    raise ValueError(f"got {str(file)!r}, of no known format; {EXPECTED}.")
  arrays, notes = google.averaged(open_npz(file))
  for name, of_format in NPZ.items():
    if of_format.looks_like(arrays):
      params, stated = of_format.read(arrays)
      # Publishers of these formats have images in [-1, 1].
      pixels, texts = normalisation.HALF, google.left_out(arrays)
      if texts:
        notes.append(f"left out: {shorten(texts)}, which only texts need.")
      if google.has_empty_head(params):
        del params["head/kernel"], params["head/bias"]
        notes.append("the file's classifier is all zeros, and left out.")
      return Weights(
        str(file), name, params, stated, pixels=pixels, notes=tuple(notes)
      )
  raise ValueError(unknown_names(file, arrays))


def _is_torch(file: epath.Path, head: bytes) -> bool:
  """Whether torch.save wrote a file with these first bytes."""
  if head.startswith(OLD_TORCH):
    return True
  if head[:2] != b"PK":
    return False
  try:
    with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
      return any(n.endswith("data.pkl") for n in archive.namelist())
  except zipfile.BadZipFile:
    return False


def _read_folder(folder: epath.Path, options: dict[str, Any]) -> Weights:
  names = ("model.safetensors", INDEX, TORCH_BIN, TORCH_INDEX)
  found = [name for name in names if (folder / name).exists()]
  files = found or sorted(p.name for p in folder.glob("*.safetensors"))
  if len(files) > 1 and not found:
    raise ValueError(f"got {shorten(files)}, expected one, or {INDEX}.")
  if files:
    file = file_in(folder, files[0])
    return _read_state_dict(folder, file, options, files[0] == TORCH_BIN)
  weights = read_checkpoint(folder)
  from vit_jax.finetune import lora_base

  if lora_base.is_on_base(weights.metadata):
    return lora_base.on_base(weights, read)
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
  if all(name.endswith("/value") for name in flat):  # `nnx.state` of a module
    flat = {k.removesuffix("/value"): v for k, v in flat.items()}
  if other := [k for k, v in flat.items() if not hasattr(v, "shape")]:
    raise ValueError(f"got {other[0]!r}, which is no array; {EXPECTED}.")
  params = {k: lazy(np.asarray(v)) for k, v in flat.items()}
  return _of_checkpoint(folder, params, metadata, notes)


def _of_checkpoint(
  folder: epath.Path,
  params: dict[str, LazyArray],
  metadata: dict[str, Any],
  notes: list[str],
) -> Weights:
  """Returns the weights of a checkpoint.

  Args:
    folder: Where it is.
    params: Path in the tree -> array.
    metadata: Of this codebase; {} for another program's.
    notes: What was found while reading.
  """
  stated = {}
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


def _read_state_dict(
  path: epath.Path,
  file: epath.Path,
  options: dict[str, Any],
  is_torch: bool = False,
) -> Weights:
  """Reads arrays under a PyTorch library's names.

  Args:
    path: The user's path: the file, or its folder.
    file: The file, or the index of several.
    options: Options from the user.
    is_torch: Whether torch.save wrote the file.
  """
  from vit_jax.zoo.files import state_dicts, torch_file

  notes: tuple[str, ...] = ()
  if is_torch or file.name == TORCH_INDEX:
    arrays, metadata, notes = torch_file.open_torch(file)
  else:
    arrays, metadata = open_safetensors(file)
  config = json_file.read(file_in(file.parent, "config.json"))
  weights = state_dicts.read(StateDict(path, arrays, metadata, config, options))
  return dataclasses.replace(weights, notes=(*notes, *weights.notes))


def _check_arrays(params: Mapping[str, LazyArray]) -> None:
  for name, array in params.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name}: got type {array.dtype}, expected floats.")
    known = RANKS.get(name) or RANKS.get(_without_block(name))
    rank = known or len(array.shape)
    if len(array.shape) != rank:
      raise ValueError(f"{name}: got {array.shape}, expected {rank} axes.")


def _without_block(name: str) -> str:
  """Returns the name of a block's position table as if it were the stem's."""
  if ViTConfig.block_of(name) is None:
    return name
  encoder, _, inner = name.split("/", 2)
  return f"{encoder}/{inner}"

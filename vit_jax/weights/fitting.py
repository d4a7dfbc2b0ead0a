"""Fits weights to a model, and reports what was done."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.class_names import by_name, shortened
from vit_jax.config import ModelConfig, model_config
from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models.resample import (
  METHODS,
  resample_patch_kernel,
  resample_posemb,
)
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.objectives import OBJECTIVES
from vit_jax.options import nearest
from vit_jax.step import TrainState
from vit_jax.weights.identify import describe, identify
from vit_jax.weights.weights_file import Weights

MAX_TOKENS = 2**14  # of an image; the products of all pairs take 1 GiB a head

# Trained for one set of classes: loaded as a whole or not at all.
HEAD = ("head/", "pre_logits/")
KERNEL = "embedding/kernel"
# Before the first block, or in each of them; whole, or of columns and of rows.
_TABLE = re.compile(r"posembed_input/pos_embedding(_[xy])?$")
DEFAULT_SIZE = 224  # pixels, where nothing states it

# Options of a model that its parameters do not depend on.
NUMERICS = ("gelu", "ln_eps", "gn_eps", "ws_eps", "ws_eps_on", "root_pad")
TRAINING = (
  "dropout", "stochastic_depth", "head_bias", "dtype", "scan", "remat"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
  """What happened to each array; paths as in the file, blocks not stacked.

  Attributes:
    path: The file or folder of the weights.
    loaded: Path -> shape, resized ones included.
    resized: Path -> (old, new), sides of a grid or of a patch.
    reinitialised: Paths of the model that keep their initial values.
    ignored: Paths of the file that the model does not use.
    notes: Further facts that a user should know.
  """

  path: str
  loaded: dict[str, tuple[int, ...]]
  resized: dict[str, tuple[tuple[int, int], tuple[int, int]]]
  reinitialised: tuple[str, ...]
  ignored: tuple[str, ...]
  notes: tuple[str, ...] = ()


def adapt(
  weights: Weights,
  target: dict[str, Any],
  model: ModelConfig,
  image_size: tuple[int, int],
  *,
  class_names: Sequence[str] | None = None,
  posemb_filter: str = "zoom",
  resize_patch: bool = False,
  given: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Report]:
  """Fits weights to a model, as the paper does before fine-tuning.

  Arrays are taken where path and shape agree. Position tables are resampled to
  the model's grid. A row of the class token is added (zeros) or folded into
  `cls`, as the model requires, which changes no output. Blocks are stacked or
  not, as in the model. Head and pre_logits are taken together, if both agree in
  all shapes and the classes are not known to differ, with the head's columns in
  the order of the model's classes; otherwise the model keeps its initial ones.
  The parameters that an objective adds to the network are taken together as
  well, if all their shapes agree. All other arrays must agree.

  Args:
    weights: Weights from `read`.
    target: The model's parameters, a nested dict of anything with a shape.
    model: The model of `target`.
    image_size: (height, width) of its images, pixels.
    class_names: Class names of the model's data; None where they are unknown.
    posemb_filter: Filter that resamples tables, a name of
      `models.resample.METHODS`; "zoom" is the paper's.
    resize_patch: Whether a patch embedding of another patch size is resized
      (FlexiViT's pseudoinverse) instead of refused.
    given: What the caller stated of the weights, for the message.

  Returns:
    Nested dict like `target` of numpy float32 arrays, None where the model
    keeps its initial values; and the report.

  Raises:
    ValueError: `posemb_filter` is unknown; or parameters are missing,
      superfluous, of another shape or not finite: the message lists them all,
      and names the model that would fit.

  Source: arXiv:2010.11929, section 3.2.
  """
  if posemb_filter not in METHODS:
    raise ValueError(
      f"posemb_filter: got {posemb_filter!r}, expected one of"
      f" {', '.join(METHODS)}.{nearest(posemb_filter, METHODS)}"
    )
  unstacked = jax.eval_shape(unstack_blocks, target)
  expected = {k: tuple(v.shape) for k, v in _flatten(unstacked).items()}
  got: dict[str, Any] = dict(weights.params)
  shapes = {k: tuple(v.shape) for k, v in got.items()}  # as in the file
  notes = [*weights.notes, *_numerics(weights.options, model)]
  errors: list[str] = []
  resized: dict[str, tuple] = {}

  reinitialised, ignored = _heads(
    got, expected, weights.class_names, class_names, notes
  )
  fresh, unused = _own_of_objectives(got, expected)
  reinitialised, ignored = reinitialised + fresh, ignored + unused
  _fit_positions(
    got, expected, weights, model, image_size, posemb_filter, resized, errors,
    notes,
  )  # fmt: skip
  if KERNEL in got and KERNEL in expected and resize_patch:
    old, new = shapes[KERNEL], expected[KERNEL]
    if len(old) == 4 and old[2:] == new[2:] and old[:2] != new[:2]:
      resized[KERNEL] = (old[:2], new[:2])
      got[KERNEL] = resample_patch_kernel(
        np.asarray(got[KERNEL], np.float32), new[:2]
      )

  loaded: dict[str, Any] = {}
  for path in sorted(expected.keys() | got.keys()):
    if path in reinitialised or path in ignored:
      loaded |= {path: None} if path in reinitialised else {}
    elif path not in got:
      errors.append(f"{path}: missing, expected shape {expected[path]}.")
    elif path not in expected:
      errors.append(
        f"{path}: got shape {shapes[path]}, expected no such parameter."
      )
    elif np.shape(got[path]) != expected[path]:
      errors.append(
        f"{path}: got shape {shapes[path]}, expected {expected[path]}."
        + _advice(path, shapes[path], expected[path])
      )
    else:
      loaded[path] = expected[path]
  if not errors:  # no array is read before all errors are known
    read = [path for path, shape in loaded.items() if shape is not None]
    # In this order arrays stacked in one array of the file are neighbours.
    for path in sorted(read, key=lambda p: re.sub(r"encoderblock_\d+", "", p)):
      loaded[path] = np.asarray(got.pop(path), np.float32)
      if bad := int(np.sum(~np.isfinite(loaded[path]))):
        errors.append(
          f"{path}: got {bad} values that are NaN or infinite, expected none."
        )
  if errors:
    raise ValueError(_message(weights, model, errors, given or {}))
  report = Report(
    path=weights.path,
    loaded={k: v.shape for k, v in loaded.items() if v is not None},
    resized=resized,
    reinitialised=reinitialised,
    ignored=ignored,
    notes=tuple(dict.fromkeys(notes)),
  )
  params = flax.traverse_util.unflatten_dict(loaded, sep="/")
  if "encoderblock" in target.get("Transformer", {}):
    params = stack_blocks(params)
  return params, report


def format_report(report: Report) -> str:
  """Returns a table of the arrays loaded, resized, re-initialised, ignored."""
  count = sum(math.prod(shape) for shape in report.loaded.values())
  resized = (
    f"{path}: {old[0]}x{old[1]} -> {new[0]}x{new[1]}"
    for path, (old, new) in report.resized.items()
  )
  rows = [
    ("weights", report.path),
    ("loaded", f"{len(report.loaded)} arrays, {count:,} parameters"),
    ("resized", ", ".join(resized) or "nothing"),
    ("re-initialised", ", ".join(report.reinitialised) or "nothing"),
    ("ignored", ", ".join(report.ignored) or "nothing"),
    *(("note", note) for note in report.notes),
  ]
  return "\n".join(f"{key:<16}{value}" for key, value in rows)


def _heads(got, expected, old_names, new_names, notes):
  """Returns the head's paths that stay initial, and those left out.

  Puts the head's columns, in `got`, into the order of the new names.
  """
  heads = [
    {k: tuple(v.shape) for k, v in got.items() if k.startswith(HEAD)},
    {k: v for k, v in expected.items() if k.startswith(HEAD)},
  ]
  fits = heads[0] == heads[1]
  if fits and heads[0] and new_names and not old_names:
    notes.append(
      "the head is kept as it is: it has as many classes as the data, and no"
      " names of its own to compare."
    )
  elif fits and heads[0] and new_names and old_names:
    columns = by_name(new_names, old_names)
    if columns is None or len(columns) != len(old_names):
      fits = False
      notes.append(
        "the head is not loaded: its classes are others"
        f" ({shortened(old_names)}; those of the data: {shortened(new_names)})."
      )
    elif not np.array_equal(columns, np.arange(len(columns))):
      for path in ("head/kernel", "head/bias"):
        got[path] = got[path].then(
          got[path].shape, lambda a: np.asarray(a)[..., columns]
        )
      notes.append(
        "the head's classes were put in the order of the data's, by name."
      )
  if fits:
    return (), ()
  left_out = tuple(sorted(heads[0].keys() - heads[1].keys()))
  return tuple(sorted(heads[1])), left_out


def _own_of_objectives(got, expected):
  """Returns paths that objectives add to a network: initial, and left out.

  Those of an objective are taken together, if all shapes agree.
  """
  fresh, unused = (), ()
  for own in filter(None, (cls.own for cls in OBJECTIVES.values())):
    theirs = {k: tuple(v.shape) for k, v in got.items() if k.startswith(own)}
    ours = {k: v for k, v in expected.items() if k.startswith(own)}
    if theirs != ours:
      fresh += tuple(sorted(ours))
      unused += tuple(sorted(theirs.keys() - ours.keys()))
  return fresh, unused


def _fit_positions(
  got, expected, weights, model, image_size, method, resized, errors, notes
) -> None:
  """Resamples the position tables in `got` for the model."""
  tables = [p for p in got.keys() & expected.keys() if _TABLE.search(p)]
  for path in sorted(tables):
    if not path.endswith("pos_embedding"):  # of rows or of columns
      old, new = got[path].shape[1], expected[path][1]
      if old != new:
        matrix = METHODS[method](old, new)
        got[path] = np.einsum(
          "no,bod->bnd", matrix, np.asarray(got[path], np.float64)
        ).astype(np.float32)
        resized[path] = ((1, old), (1, new))
      continue
    grid = model.grid(image_size)
    has_row, wants_row = weights.has_cls_row, model.has_cls_row
    try:
      old_grid = table_grid(weights)
      if ("cls" in got) == ("cls" in expected):
        table = resample_posemb(
          np.asarray(got[path], np.float32), old_grid, grid, has_row, method
        )
        if old_grid != grid:
          resized[path] = (old_grid, grid)
        if wants_row and not has_row:
          table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
          notes.append("the position table got a row of zeros for cls.")
        if has_row and not wants_row:
          if model.posemb_at != "stem":
            raise ValueError(
              "got a row for the class token, which is added in every block"
              f" (config.model.posemb_at={model.posemb_at!r}) and cannot become"
              " part of cls; expected config.model.cls_row=True."
            )
          got["cls"] = np.asarray(got["cls"], np.float32) + table[:, :1]
          table = table[:, 1:]
          notes.append("row 0 of the position table was added to cls.")
        got[path] = table
    except ValueError as e:
      errors.append(f"{path}: {e}")
      del got[path], expected[path]


def table_grid(weights: Weights) -> tuple[int, int] | None:
  """Returns rows and columns of patches of the position table.

  A file that states none is of a published format: all grids are square.

  Returns:
    None if there is no table.

  Raises:
    ValueError: The file states none, and the number of patches is no square.
  """
  tables = {p: a for p, a in weights.params.items() if _TABLE.search(p)}
  if sides := {p[-1]: a.shape[1] for p, a in tables.items() if p[-2] == "_"}:
    return sides["y"], sides["x"]
  if not tables or weights.grid:
    return weights.grid
  num_rows = next(iter(tables.values())).shape[1]
  num_patches = num_rows - int(weights.has_cls_row)
  side = math.isqrt(num_patches)
  if side * side != num_patches:
    row = "with" if weights.has_cls_row else "without"
    raise ValueError(
      f"got {num_patches} patches ({row} a row for the class token), expected a"
      " square number, since the file states no grid. State it: grid=(rows,"
      " columns), and cls_row if that is wrong."
    )
  return side, side


def _numerics(options: dict[str, Any], model: ModelConfig) -> list[str]:
  """Returns how the model computes otherwise than the weights were trained."""
  norms = ("gn_eps", "ws_eps", "ws_eps_on")
  options = {k: v for k, v in options.items() if k in (*model.NUMERICS, *norms)}
  keys = [key for key in model.NUMERICS if key not in norms]
  notes = [
    f"these weights were trained with {key}={options[key]}, the model has"
    f" {getattr(model, key)}; config.model.{key}={options[key]} keeps it."
    for key in keys
    if key in options and options[key] != getattr(model, key)
  ]
  if isinstance(model, BiTConfig) or "gn_eps" in options:
    trained = dataclasses.replace(model, **options).norms
    if trained != model.norms:
      notes.append(
        "these weights were trained with gn_eps, ws_eps, ws_eps_on ="
        f" {tuple(trained)}, the model has {tuple(model.norms)}."
      )
  return notes


def _advice(path: str, got: tuple, expected: tuple) -> str:
  if path == KERNEL and got[2:] == expected[2:]:
    return (
      f" To resize it: vit_jax.load(path, patch={expected[0]}), or"
      f" vit-jax convert SRC DST --to=orbax --patch={expected[0]}."
    )
  if path.endswith("/offsets"):
    return " Offsets of another number of tokens cannot be resampled."
  return ""


def _message(
  weights: Weights, model: ModelConfig, errors: list[str], given: dict[str, Any]
) -> str:
  lines = "\n".join(f"  - {error}" for error in _grouped(errors))
  try:
    kept = {
      f: getattr(model, f) for f in (*NUMERICS, *TRAINING) if hasattr(model, f)
    }
    options = {f: v for f, v in weights.options.items() if f not in TRAINING}
    fits = identify(weights.params, kept | options)
  except (TypeError, ValueError) as e:
    advice = f"No model of ours fits them: {e}"
  else:
    if fits != model:
      advice = f"The model that fits them: {describe(fits, model)}"
    elif text := ", ".join(f"{k}={v!r}" for k, v in given.items()):
      advice = (
        f"The model is by what you gave, {text}: change it or leave it out."
      )
    else:
      advice = "The model is the right one; take other weights."
  return (
    f"{len(errors)} error{'s' * (len(errors) != 1)} in the weights of"
    f" {weights.path} for this model:\n{lines}\n{advice}"
  )


def _grouped(errors: list[str]) -> list[str]:
  """Merges paths that differ only in the number of a block or unit."""
  groups: dict[str, list[str]] = {}
  for error in errors:
    path, _, text = error.partition(":")
    same = re.sub(r"(encoderblock_|unit)\d+", r"\1*", path)
    groups.setdefault(f"{same}:{text}", []).append(error)
  return [
    group[0] if len(group) == 1 else f"{text} ({len(group)} times)"
    for text, group in groups.items()
  ]


def _flatten(params: dict[str, Any]) -> dict[str, Any]:
  return flax.traverse_util.flatten_dict(params, sep="/")


def trained_at(weights: Weights) -> tuple[int, int]:
  """Returns (height, width) of the images that weights were trained on, pixels.

  Taken from the file, else from the position table, else 224.

  Raises:
    ValueError: No model fits the arrays or the size; or as `table_grid`.
  """
  config = identify(weights.params, weights.options)
  grid = table_grid(weights)
  if weights.image_size:
    _check_size(weights.image_size, config, grid)
    return weights.image_size
  if grid is None or not isinstance(config, ViTConfig):
    return DEFAULT_SIZE, DEFAULT_SIZE
  # Pixels per token: the image size that gives one token.
  probe = 2**14
  stride = probe // config.feature_map((probe, probe))[0]
  patch = weights.params[KERNEL].shape[0]
  return grid[0] * patch * stride, grid[1] * patch * stride


def _check_size(size, config: ModelConfig, grid) -> None:
  """Raises ValueError if images of the size that a file states fit it not."""
  if any(config.size_errors(size)):
    raise ValueError(
      f"image size: got {size[0]} x {size[1]} pixels, expected multiples of the"
      " side of a patch. State the right size: image_size=(height, width)."
    )
  tokens = config.num_tokens(size) or 0
  if tokens > MAX_TOKENS or (grid and tuple(config.grid(size)) != tuple(grid)):
    makes = " x ".join(map(str, config.grid(size)))
    has = " x ".join(map(str, grid)) if grid else f"at most {MAX_TOKENS:,}"
    raise ValueError(
      f"image size: got {size[0]} x {size[1]} pixels, which make {makes}"
      f" patches, expected {has}, as the arrays have. State the right size:"
      " image_size=(height, width)."
    )


def model_to_finetune(weights: Weights) -> ModelConfig:
  """Returns the model of some weights, as it is fine-tuned on other classes.

  Family, size and numerics are those of the weights. The tanh layer before the
  head is dropped, as in arXiv:2010.11929. Options that only training uses
  (dropout, type of the products, ...) have their defaults.
  """
  fresh = model_config()
  defaults = {name: getattr(fresh, name) for name in (*TRAINING, "pre_logits")}
  return identify(weights.params, {**weights.options, **defaults})


def replace_params(state: TrainState, params: dict[str, Any]) -> TrainState:
  """Returns a fresh state with the weights of config.init.

  Args:
    state: A state at step 0.
    params: Nested dict like that of the state; None where a parameter keeps its
      initial value, such as the head for other classes.
  """
  params = jax.tree.map(
    lambda fresh, new: (
      fresh if new is None else jax.device_put(new, fresh.sharding)
    ),
    state.params,
    params,
  )
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return state.replace(params=params, ema=ema)

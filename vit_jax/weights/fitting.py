"""Fits weights to a model, and reports what happened to each array."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import numpy as np

from vit_jax.class_names import by_name, by_number, shortened
from vit_jax.config import ModelConfig
from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models.posemb import sincos2d
from vit_jax.models.resample import (
  METHODS,
  num_bias_rows,
  resample_patch_kernel,
  resample_posemb,
  resample_relative_bias,
)
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.objectives import OBJECTIVES
from vit_jax.options import check_choice
from vit_jax.weights.identification import describe, identify
from vit_jax.weights.weights_file import LazyArray, Weights

# Layer before the head, trained with it for one set of classes: both are loaded
# as a whole or not at all.
PRE_LOGITS = "pre_logits/"
DEFAULT_SIZE = 224  # pixels, where nothing states it
PUBLISHED = ("google", "bit")  # formats whose grids are square

# Options of a model that its parameters do not depend on.
NUMERICS = ("gelu", "ln_eps", "gn_eps", "ws_eps", "ws_eps_on", "root_pad")
TRAINING = (
  "dropout", "stochastic_depth", "stochastic_depth_rule", "head_bias", "dtype",
  "scan", "remat", "rope_rescale",
)  # fmt: skip

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Report:
  """What happened to each array. Paths are the file's, blocks not stacked.

  Attributes:
    path: The file or folder of the weights.
    loaded: Path -> shape, with resized arrays.
    resized: Path -> (old, new), sides of a grid or of a patch.
    reinitialised: Paths of the model that keep their initial values.
    ignored: Paths of the file that the model does not use.
    notes: Further facts for the user.
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
  posemb_filter: str | None = None,
  resize_patch: bool = False,
  own: str | None = None,
) -> tuple[dict[str, Any], Report]:
  """Fits weights to a model, as the paper does before fine-tuning.

  An array is loaded if path and shape agree. The exceptions are:

  - Position tables are resampled to the model's grid. If only the file has
    a row for the class token, the row is added to `cls`; if only the model has
    one, it is zeros. Neither changes an output.
  - Head and pre_logits are loaded together, if all their shapes agree and the
    classes are not known to differ. The head's columns get the order of the
    model's classes. Otherwise both keep their initial values.
  - The parameters that an objective adds to the network are loaded together, if
    all their shapes agree.
  - If the model learns a table of positions, and the weights were trained with
    fixed sines, the sines are the table's first values, as in MAE's
    fine-tuning.
  - If the model has a norm of the pooled vector, the file's norm of the tokens
    is not loaded, and the model's norm keeps its initial values, as in MAE's
    fine-tuning.
  - Blocks become stacked or not, as in the model.

  All other arrays must agree.

  Args:
    weights: Weights from `read`.
    target: The model's parameters, a nested dict of anything with a shape.
    model: The model of `target`.
    image_size: (height, width) of its images, pixels.
    class_names: Class names of the model's data; None if unknown.
    posemb_filter: Filter that resamples tables, a name of
      `models.resample.METHODS`; None for `weights.posemb_filter`, or the
      paper's "zoom" if that is None.
    resize_patch: Whether to resize a patch embedding of another patch size
      (FlexiViT's pseudoinverse); otherwise it is an error.
    own: `Objective.own` of the model's objective; None: it has no parameters.

  Returns:
    Nested dict like `target` of numpy float32 arrays, with None for parameters
    that keep their initial values; the report.

  Raises:
    ValueError: `posemb_filter` is unknown; or parameters are missing,
      superfluous, of another shape or not finite. The message lists them all,
      and names the model that would fit.

  Source: arXiv:2010.11929, section 3.2.
  """
  posemb_filter = posemb_filter or weights.posemb_filter or "zoom"
  check_choice(posemb_filter, METHODS, "posemb_filter")
  unstacked = jax.eval_shape(lambda x: unstack_blocks(x, model), target)
  fit = _Fit(weights, model, _shapes(_flatten(unstacked)))
  fit.choose_head(class_names)
  fit.choose_parameters_of_objectives(own)
  fit.choose_last_norm()
  fit.resample_positions(image_size, posemb_filter)
  fit.tabulate_sines(image_size)
  fit.fold_channels()
  if resize_patch:
    fit.resize_patch_kernel()
  paths = fit.matching_paths()
  if not fit.errors:  # no other array is read before all errors are known
    loaded = fit.read(paths)
  if fit.errors:
    raise ValueError(_message(weights, model, fit.errors))
  report = Report(
    path=weights.path,
    loaded=_shapes(loaded),
    resized=fit.resized,
    reinitialised=fit.reinitialised,
    ignored=fit.ignored,
    notes=tuple(dict.fromkeys(fit.notes)),
  )
  params = flax.traverse_util.unflatten_dict(
    loaded | dict.fromkeys(fit.reinitialised), sep="/"
  )
  if any(map(model.is_scanned, _flatten(target))):
    params = stack_blocks(params, model)
  return params, report


class _Fit:
  """Weights on their way to a model; each method is a step of `adapt`.

  Attributes:
    weights: The file.
    model: The model.
    expected: Path -> shape in the model.
    params: Path -> array of the file, changed by the steps.
    resized, reinitialised, ignored: See `Report`.
    notes: Facts for the user.
    errors: Messages; the first word is the path.
  """

  def __init__(
    self, weights: Weights, model: ModelConfig, expected: dict[str, Shape]
  ):
    self.weights, self.model, self.expected = weights, model, expected
    self.params: dict[str, LazyArray | np.ndarray] = dict(weights.params)
    self.resized: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    self.reinitialised: tuple[str, ...] = ()
    self.ignored: tuple[str, ...] = ()
    self.notes = [*weights.notes, *_numerics(weights.options, model)]
    self.errors: list[str] = []

  def choose_head(self, class_names: Sequence[str] | None) -> None:
    """Loads the head, columns in the order of the model's classes, or not."""
    shapes, expected = self._shapes_where(
      lambda path: self.model.is_head(path) or path.startswith(PRE_LOGITS)
    )
    loads = shapes == expected
    old_names = self.weights.class_names
    if loads and shapes and class_names and not old_names:
      self.notes.append("the head is loaded by its number of classes.")
      columns = by_number(class_names, len(class_names))
      if columns is not None:
        self._reorder_head(columns, "by number")
    elif loads and shapes and class_names and old_names:
      columns = by_name(class_names, old_names)
      if columns is None or len(columns) != len(old_names):
        loads = False
        self.notes.append(
          f"the head is not loaded: its classes ({shortened(old_names)}) are"
          f" not the data's ({shortened(class_names)})."
        )
      else:
        self._reorder_head(columns, "by name")
    if not loads:
      self._reinitialise(shapes, expected)

  def _reorder_head(self, columns: np.ndarray, how: str) -> None:
    """Puts the head's columns in the order of the data's classes."""
    if np.array_equal(columns, np.arange(len(columns))):
      return
    for path in filter(self.model.is_head, self.params):
      array = self.params[path]
      self.params[path] = array.then(array.shape, lambda a: a[..., columns])
    self.notes.append(f"the head's classes got the data's order, {how}.")

  def choose_parameters_of_objectives(self, own: str | None) -> None:
    """Loads the parameters that each objective adds to a network, or not.

    Args:
      own: Start of the paths of those in the model, or None.
    """
    in_file = self.weights.metadata.get("objective_parameters")
    known = [cls.own for cls in OBJECTIVES.values()]
    for start in dict.fromkeys(filter(None, [*known, own, in_file])):
      shapes, expected = self._shapes_under(start)
      if shapes != expected:
        self._reinitialise(shapes, expected)

  def choose_last_norm(self) -> None:
    """Drops the norm of tokens if the model has one of the pooled vector."""
    tokens, is_left = self._shapes_under("Transformer/encoder_norm/")
    pooled, expected = self._shapes_under("pooled_norm/")
    if tokens and expected and not pooled and not is_left:
      self._reinitialise(tokens, expected)
      self.notes.append("the norm of the pooled vector has initial values.")

  def tabulate_sines(self, image_size: tuple[int, int]) -> None:
    """Gives a learned table the fixed sines of the weights as first values."""
    is_fixed = self.weights.options.get("posemb") == "sincos2d"
    at_stem = getattr(self.model, "posemb_at", "stem") == "stem"
    for path in self.expected.keys() - self.params.keys():
      if is_fixed and at_stem and self.model.positions(path) == "grid":
        _, num_rows, width = self.expected[path]
        sines = sincos2d(*self.model.grid(image_size), width)
        num_zeros = num_rows - len(sines)  # the rows of class tokens
        self.params[path] = np.pad(sines, ((num_zeros, 0), (0, 0)))[None]
        note = "the table of positions got the fixed sines of the weights."
        self.notes.append(note)

  def _shapes_under(
    self, prefix: str | tuple[str, ...]
  ) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns the shapes in the file, and those in the model."""
    return self._shapes_where(lambda path: path.startswith(prefix))

  def _shapes_where(
    self, is_one: Callable[[str], bool]
  ) -> tuple[dict[str, Shape], dict[str, Shape]]:
    return (
      _shapes({k: v for k, v in self.params.items() if is_one(k)}),
      {k: v for k, v in self.expected.items() if is_one(k)},
    )

  def _reinitialise(
    self, shapes: dict[str, Shape], expected: dict[str, Shape]
  ) -> None:
    self.reinitialised += tuple(sorted(expected))
    self.ignored += tuple(sorted(shapes.keys() - expected.keys()))

  def resample_positions(
    self, image_size: tuple[int, int], method: str
  ) -> None:
    """Resamples the position tables to the model's grid."""
    tables = self.params.keys() & self.expected.keys()
    for path in sorted(filter(self.model.positions, tables)):
      form = self.model.positions(path)
      if form in ("rows", "columns"):
        self._resample_line(path, method)
        continue
      resample = self._resample_table
      if form == "relative_bias":
        resample = self._resample_relative
      try:
        resample(path, self.model.grid(image_size), method)
      except ValueError as e:
        self.errors.append(f"{path}: {e}")
        del self.params[path], self.expected[path]

  def _resample_line(self, path: str, method: str) -> None:
    old, new = self.params[path].shape[1], self.expected[path][1]
    if old != new:
      table = np.asarray(self.params[path], np.float64)
      table = np.einsum("no,bod->bnd", METHODS[method](old, new), table)
      self.params[path] = table.astype(np.float32)
      self.resized[path] = ((1, old), (1, new))

  def _resample_relative(
    self, path: str, grid: tuple[int, int], method: str
  ) -> None:
    """Resamples a table over offsets; the class token's rows do not change."""
    old_grid = table_grid(self.weights, self.model, grid)
    if old_grid != grid:
      table = np.asarray(self.params[path], np.float32)
      self.params[path] = resample_relative_bias(table, old_grid, grid, method)
      self.resized[path] = (old_grid, grid)

  def _resample_table(
    self, path: str, grid: tuple[int, int], method: str
  ) -> None:
    num_rows = self.weights.class_rows(self.model)
    wanted = self.model.num_class_rows
    old_grid = table_grid(self.weights, self.model, grid)
    side = math.isqrt(math.prod(old_grid))
    is_other = grid != (side, side) and math.prod(grid) == math.prod(old_grid)
    if is_other and not self.weights.grid:
      sides = f"{old_grid[0]} x {old_grid[1]}"
      self.notes.append(f"positions are read as {sides} patches; see grid=.")
    every = self.model.CLASS_TOKENS
    tokens = every[: self.model.num_class_tokens]
    names = " and ".join(tokens)
    if any((t in self.params) != (t in self.expected) for t in every):
      return  # an error in any case
    table = np.asarray(self.params[path], np.float32)
    table = resample_posemb(table, old_grid, grid, num_rows, method)
    if old_grid != grid:
      self.resized[path] = (old_grid, grid)
    if wanted and not num_rows:
      table = np.pad(table, ((0, 0), (wanted, 0), (0, 0)))
      self.notes.append(f"the position table got zeros for {names}.")
    if num_rows and not wanted:
      if self.model.posemb_at != "stem":
        raise ValueError("got a row of cls; set config.model.cls_row=True.")
      for i, token in enumerate(tokens):
        array = np.asarray(self.params[token], np.float32)
        self.params[token] = array + table[:, i : i + 1]
      table = table[:, num_rows:]
      self.notes.append(f"the first rows of positions were added to {names}.")
    self.params[path] = table

  def fold_channels(self) -> None:
    """Gives the patch embedding the model's number of channels.

    Each new channel gets the sum over the file's channels, divided by the new
    number of channels. So an image whose channels are all equal gets the same
    response as before: a grey image that of the same image in colours.
    """
    name = self._patches
    old = getattr(self.params.get(name), "shape", ())
    new = self.expected.get(name, ())
    is_behind = getattr(self.model, "stages", None)  # a ResNet, not pixels
    if len(old) != 4 or len(new) != 4 or old[2] == new[2] or is_behind:
      return
    count = new[2]

    def folded(kernel):
      mean = np.sum(np.asarray(kernel, np.float32), 2, keepdims=True) / count
      return np.repeat(mean, count, axis=2)

    shape = (*old[:2], count, old[3])
    self.params[name] = self.params[name].then(shape, folded)
    self.notes.append(f"{name}: {old[2]} channels became {count} equal ones.")

  def resize_patch_kernel(self) -> None:
    """Resizes the patch embedding to the model's patch size."""
    name = self._patches
    if name not in self.params or name not in self.expected:
      return
    old, new = self.params[name].shape, self.expected[name]
    if len(old) == 4 and old[2:] == new[2:] and old[:2] != new[:2]:
      self.resized[name] = (old[:2], new[:2])
      self.params[name] = resample_patch_kernel(
        np.asarray(self.params[name], np.float32), new[:2]
      )

  @property
  def _patches(self) -> str:
    """The path of the kernel of the patch embedding."""
    return f"{self.model.PATCHES}/kernel"

  def matching_paths(self) -> list[str]:
    """Returns the paths to load; the others are errors."""
    paths = []
    for path in sorted(self.expected.keys() | self.params.keys()):
      if path in self.reinitialised or path in self.ignored:
        continue
      array, expected = self.params.get(path), self.expected.get(path)
      # The error names the shape in the file, from before it was resized.
      shape = getattr(self.weights.params.get(path), "shape", None)
      if getattr(array, "shape", None) == expected:
        paths.append(path)
        continue
      got = "missing" if array is None else f"got shape {shape}"
      wanted = "no such parameter" if expected is None else expected
      self.errors.append(f"{path}: {got}, expected {wanted}.")
      if not (shape and expected):
        continue
      if path == self._patches and shape[2:] == expected[2:]:
        self.errors[-1] += f" patch={expected[0]} resizes it."
      is_table = len(shape) == 3 and shape[::2] == expected[::2]
      if is_table and not self.model.POSITIONS:
        family = type(self.model).__name__
        self.errors[-1] += f" {family}.POSITIONS declares no positions."
    return paths

  def read(self, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads arrays as float32; values that are not finite are an error."""
    loaded = dict.fromkeys(sorted(paths))
    # Reads blocks of one stacked array consecutively, so that it is read once.
    for path in sorted(paths, key=self.model.any_block):
      loaded[path] = np.asarray(self.params.pop(path), np.float32)
      if count := int(np.sum(~np.isfinite(loaded[path]))):
        self.errors.append(f"{path}: got {count} NaN or infinite values.")
    return loaded


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


def table_grid(
  weights: Weights,
  model: ModelConfig,
  wanted: tuple[int, int] | None = None,
) -> tuple[int, int] | None:
  """Returns rows and columns of patches of the position table.

  If the file does not say, a published file has a square grid. Another file has
  the grid of the user's images if that has as many patches, and otherwise a
  square grid.

  Args:
    weights: The file.
    model: Its model.
    wanted: Rows and columns of the images that it will get; None if unknown.

  Returns:
    (rows, columns), or None without a table.

  Raises:
    ValueError: The file does not say, and the number of patches is no square.
  """
  forms = {p: model.positions(p) for p in weights.params}
  tables = {p: a for p, a in weights.params.items() if forms[p]}
  sides = {forms[p]: a.shape[1] for p, a in tables.items()}
  if "rows" in sides and "columns" in sides:
    return sides["rows"], sides["columns"]
  if not tables or weights.grid:
    return weights.grid
  path, table = next(iter(tables.items()))
  if forms[path] == "relative_bias":
    return _grid_of_offsets(table.shape[0], wanted)
  num_rows = table.shape[1]
  num_patches = num_rows - weights.class_rows(model)
  side = math.isqrt(num_patches)
  is_square = side * side == num_patches
  if wanted is not None and weights.format not in PUBLISHED:
    if math.prod(wanted) == num_patches:
      return wanted
  if not is_square:
    raise ValueError(
      f"got {num_patches} patches, expected a square number, or"
      " grid=(rows, columns) and cls_row=True or False stated."
    )
  return side, side


def _grid_of_offsets(
  num_rows: int, wanted: tuple[int, int] | None
) -> tuple[int, int]:
  """Returns the grid of a table with a row per offset; see `table_grid`."""
  if wanted is not None and num_bias_rows(wanted) == num_rows:
    return wanted
  side = (math.isqrt(num_rows) + 1) // 2
  if num_bias_rows((side, side)) != num_rows:
    raise ValueError(f"got {num_rows} rows of offsets; pass grid=.")
  return side, side


def _numerics(options: dict[str, Any], model: ModelConfig) -> list[str]:
  """Returns notes on numerics in which the model differs from the weights."""
  norms = ("gn_eps", "ws_eps", "ws_eps_on")
  options = {k: v for k, v in options.items() if k in (*model.NUMERICS, *norms)}
  both = {
    key: (options[key], getattr(model, key))
    for key in model.NUMERICS
    if key in options and key not in norms
  }
  if isinstance(model, BiTConfig) or "gn_eps" in options:
    trained = dataclasses.replace(model, **options).norms
    both["gn_eps, ws_eps, ws_eps_on"] = tuple(trained), tuple(model.norms)
  return [
    f"these weights were trained with {key}={old}, the model has {new}."
    for key, (old, new) in both.items()
    if old != new
  ]


def _message(weights: Weights, model: ModelConfig, errors: list[str]) -> str:
  """Returns all errors, and the model that would fit the weights."""
  lines = [f"  - {error}" for error in _grouped(errors, model)]
  try:
    options = _named(model, NUMERICS)
    fits = identify(weights.params, options | _kept(weights))
    same = _named(model, TRAINING).keys() & _named(fits, TRAINING).keys()
    fits = dataclasses.replace(fits, **{f: getattr(model, f) for f in same})
  except (TypeError, ValueError):  # no model fits
    fits = model
  if fits != model:
    lines.append(f"The model that fits them: {describe(fits, model)}")
  # `errors` has one for each array, `lines` one for each kind.
  plural = "s" * (len(errors) != 1)
  title = f"{len(errors)} error{plural} in the weights of {weights.path}"
  return "\n".join([f"{title} for this model:", *lines])


def _named(model: ModelConfig, names: Sequence[str]) -> dict[str, Any]:
  """Returns the options of these names that the model's family has."""
  fields = {f.name for f in dataclasses.fields(model)}  # no class attributes
  return {name: getattr(model, name) for name in names if name in fields}


def _grouped(errors: list[str], model: ModelConfig) -> list[str]:
  """Merges paths that differ only in the number of a block or unit."""
  groups: dict[str, list[str]] = {}
  for error in errors:
    path, _, text = error.partition(":")
    # Paths are the model's, or those of a file of our Transformers.
    same = ViTConfig.any_block(model.any_block(path))
    same = re.sub(r"unit\d+", "unit*", same)
    groups.setdefault(f"{same}:{text}", []).append(error)
  return [
    group[0] if len(group) == 1 else f"{text} ({len(group)} times)"
    for text, group in groups.items()
  ]


def _flatten(params: dict[str, Any]) -> dict[str, Any]:
  return flax.traverse_util.flatten_dict(params, sep="/")


def _shapes(arrays: dict[str, Any]) -> dict[str, Shape]:
  return {path: tuple(array.shape) for path, array in arrays.items()}


def trained_at(weights: Weights) -> tuple[int, int]:
  """Returns (height, width) of the images that weights were trained on, pixels.

  This is the size that the file states, otherwise that of the position table,
  otherwise 224.

  Raises:
    ValueError: No model fits the arrays; or as `table_grid`.
  """
  if weights.image_size:
    return weights.image_size
  model = identify(weights.params, weights.options)
  grid = table_grid(weights, model)
  if grid is None:
    return DEFAULT_SIZE, DEFAULT_SIZE
  probe = 2**20  # pixels, of which a patch is a small part
  rows, columns = model.grid((probe, probe))
  return grid[0] * (probe // rows), grid[1] * (probe // columns)


def model_to_finetune(weights: Weights) -> ModelConfig:
  """Returns the model of some weights, for fine-tuning on other classes.

  Family, size and numerics are those of the weights. The tanh layer before the
  head is dropped, as in arXiv:2010.11929. Options that only training uses
  (dropout, type of the products, ...) have their defaults.

  Raises:
    ValueError: No model fits the arrays.
  """
  return identify(weights.params, _kept(weights) | {"pre_logits": False})


def _kept(weights: Weights) -> dict[str, Any]:
  """Returns the options of weights that not only training uses."""
  return {k: v for k, v in weights.options.items() if k not in TRAINING}

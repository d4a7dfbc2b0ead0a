"""Reads arrays under the names of another library, by a table of series.

A series is a `Series`: how its files are recognised, its key tables, what no
array shows, and what its config states. `state_dicts.py` has the table of all.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.options import shown, unexpected
from vit_jax.weights.assumptions import LOST_POSITIONS, has_positions
from vit_jax.weights.identification import has_modern_parts
from vit_jax.weights.weights_file import (
  LazyArray,
  StateDict,
  Weights,
  metadata_of,
  model_of,
  num_heads_of,
  shorten,
  with_metadata,
)
from vit_jax.zoo.files.torch_layout import Row, add_zero_biases, to_ours

Arrays = Mapping[str, LazyArray]
Params = dict[str, LazyArray]


class Stated(NamedTuple):
  """What the files beside the arrays state.

  file: Name of the config, for messages.
  config: Its contents, with the types of the series.
  num_heads: Attention heads; None if they are not stated.
  values: Key of the config -> value that `Series.values` compares.
  has_no_positions: Whether the model is stated to have no position table.
  """

  file: str = "config.json"
  config: Any = None
  num_heads: int | None = None
  values: Mapping[str, Any] = {}
  has_no_positions: bool = False


def _all_of_them(arrays: Arrays, _: Stated) -> tuple[Arrays, list[str]]:
  return arrays, []


_NONE = re.compile("(?!)")  # matches no name


class Series(NamedTuple):
  """Models whose arrays have the names of one library.

  format: `Weights.format`.
  library: Name of the library, for messages.
  marks: Whether names of arrays are of the series.
  config: A file -> what is stated beside its arrays; None -> what holds where
    nothing is stated.
  rows: Arrays -> key table; a file has some of its arrays, never all.
  facts: Arrays, our arrays -> options of our model that no array shows, and
    errors. It may change our arrays in place.
  values: Our arrays, options -> key of the config -> values for which the
    library's model computes the same as ours.
  heads: Arrays -> number of heads where nothing states it, or an error.
  complete: Weights -> weights with images, class names and loss.
  own: Arrays -> those of the model under its own names, and the others' names.
  left_out: Names of arrays that only pre-training or texts need.
  computed: Names of constants that our models compute.
  ignored: Keys of the config that change nothing; other keys that `values` does
    not have are errors. None: keys that `values` does not have are not read.
  """

  format: str
  library: str
  marks: Callable[[Collection[str]], bool]
  config: Callable[[StateDict | None], Stated]
  rows: Callable[[Arrays, Stated], list[Row]]
  facts: Callable[[Arrays, Params, Stated], tuple[dict[str, Any], list[str]]]
  values: Callable[[Params, Mapping[str, Any], Stated], Mapping[str, tuple]]
  complete: Callable[[Weights, Stated, StateDict], Weights]
  heads: Callable[[Arrays], tuple[int | None, str | None]]
  own: Callable[[Arrays, Stated], tuple[Arrays, list[str]]] = _all_of_them
  left_out: re.Pattern = _NONE
  computed: re.Pattern = _NONE
  ignored: Collection[str] | None = None


class Translated(NamedTuple):
  """The arrays of a file under our names.

  params: Our flat name -> lazy array.
  options: Options of the model that no array shows.
  stated: What is stated beside the arrays.
  notes: Facts for the user.
  assumes_heads: See `Weights`.
  """

  params: Params
  options: dict[str, Any]
  stated: Stated
  notes: tuple[str, ...]
  assumes_heads: bool = False


def read(series: Series, file: StateDict) -> Weights:
  """Returns the weights of a file of a series.

  If vit_jax wrote the file, its metadata are in the header, and no config
  beside it is read.

  Raises:
    ValueError: As `translate`; or the config or the metadata are damaged.
  """
  params, options, stated, notes, assumes_heads = translate(series, file)
  weights = Weights(
    str(file.path),
    series.format,
    params,
    options,
    assumes_heads=assumes_heads,
    notes=notes,
  )
  if not (ours := metadata_of(file)):
    return series.complete(weights, stated, file)
  weights = with_metadata(weights, ours)
  if "registers" in params:  # timm's table has no row for the class token then
    weights.options.pop("cls_row", None)
  return weights


def translate(series: Series, file: StateDict) -> Translated:
  """Returns the arrays of a file under our names, and options of the model.

  Attention without biases gets biases of zero if the model has no later parts.
  Arrays that only pre-training or texts need are left out, with a note.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; the
      number of heads is not known; or the config states something that our
      model does not compute. All errors at once.
  """
  ours = metadata_of(file)
  stated = series.config(None if ours else file)
  arrays, beside = series.own(file.arrays, stated)
  beside = [n for n in arrays if series.left_out.match(n)] + beside
  arrays = {n: a for n, a in arrays.items() if n not in {*beside}}
  errors: list[str] = []
  num_heads = file.options.get("num_heads") or num_heads_of(ours)
  assumes_heads = False
  if not (num_heads := num_heads or stated.num_heads):
    num_heads, error = series.heads(arrays)
    assumes_heads = not file.config  # which names a known architecture
    errors += [error] if error else []
  rows = series.rows(arrays, stated)
  params, shape_errors = to_ours(rows, arrays, num_heads or 1)
  errors += shape_errors
  known = {row.theirs for row in rows}
  if unknown := [n for n in arrays if n not in known]:
    unknown = [n for n in unknown if not series.computed.match(n)]
  if unknown:
    errors.append(
      f"got {len(unknown)} arrays that no model of vit_jax has:"
      f" {shorten(unknown)}."
    )
  options, fact_errors = series.facts(arrays, params, stated)
  errors += fact_errors
  errors += _contradictions(series, params, options, stated)
  is_modern = has_modern_parts(params) or options.get("name") == "modern"
  is_modern = is_modern or bool(options.get("rope"))
  if "embedding/kernel" in params and "posemb" not in options:
    if not has_positions(params):
      is_ours = (model_of(ours) or {}).get("posemb") == "none"
      if not (is_ours or "posemb" in file.options or stated.has_no_positions):
        errors.append(LOST_POSITIONS)
      options["posemb"] = "none"
      if is_modern:
        options["rope"] = None  # whose arrays alone would be DINOv3's
  if errors:
    raise ValueError(f"weights of {series.library}: " + "\n".join(errors))
  if not is_modern:
    add_zero_biases(params)
  notes = ()
  if beside:
    what = "which only pre-training, texts or another head need"
    notes = (f"left out: {shorten(beside)}, {what}.",)
  return Translated(params, options, stated, notes, assumes_heads)


def _contradictions(
  series: Series, params: Params, options: Mapping[str, Any], stated: Stated
) -> Iterator[str]:
  """Yields an error for each stated value that our model does not compute."""
  expected = series.values(params, options, stated)
  for key, value in stated.values.items():
    name = key.rpartition(".")[2]
    if name not in expected:
      if series.ignored is not None and name not in series.ignored:
        hint = "Remove it if the outputs do not change."
        got = f"{shown(value)}, a key that is not known"
        yield unexpected(f"{stated.file}: {key}", got, "none", hint)
    # By type as well: 1 is not True.
    elif (type(value), value) not in [(type(v), v) for v in expected[name]]:
      wanted = " or ".join(map(repr, expected[name]))
      wanted += ", which vit_jax computes"
      yield unexpected(f"{stated.file}: {key}", shown(value), wanted)

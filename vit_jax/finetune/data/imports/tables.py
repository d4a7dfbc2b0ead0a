"""Tables with a column of encoded images and one of labels.

If the labels are lists, the data set is multi-label. Columns named by
`--numbers` are numbers to predict.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.data.builders.image_builder import Entry, Split
from vit_jax.finetune.data.imports.listing import (
  Listing,
  Options,
  common_names,
  find_classes,
  find_column,
)


class Table(NamedTuple):
  """A file, or a split of a data set.

  name: The name, which is a part of the names of its records.
  columns: Names of the columns.
  class_names: Column -> the names of its classes; empty if there are none.
  rows: Columns -> their values in each row.
  """

  name: str
  columns: Sequence[str]
  class_names: Callable[[str], Sequence[str]]
  rows: Callable[[Sequence[str]], Iterator[tuple]]


def scan(
  by_split: Mapping[str, Sequence[Table]],
  options: Options,
  where: str,
  read: Callable[[object], bytes],
) -> Listing:
  """Lists tables; reads their columns of labels, but no image.

  Args:
    by_split: The tables of each split.
    options: The user's options.
    where: The source, for messages.
    read: Returns the encoded image of a value in the column of the images, or
      raises ValueError.

  Raises:
    ValueError: There are no such columns, or labels that cannot be used.
  """
  tables = list(itertools.chain(*by_split.values()))

  def column(option: str, given: str | None, usual: str) -> str:
    for table in tables:
      place = f"{table.name} of {where}"
      name = find_column(option, given, (usual,), table.columns, place)
    return name

  image = column("--image", options.image, "image")
  if options.numbers:
    labels = tuple(column("--numbers", c, "") for c in options.numbers)
    names = None
  else:
    labels = (column("--label", options.label, "label"),)
    names = {table.name: table.class_names(labels[0]) for table in tables}
    names = common_names(names, where)
  where = f"{where}, {', '.join(labels)}"
  values = {
    t.name: [_label(row, options) for row in t.rows(labels)] for t in tables
  }
  every = itertools.chain(*values.values())
  classes = find_classes(every, options, labels, names, where)

  def entries(tables: Sequence[Table]) -> Iterator[Entry]:
    for table in tables:
      for i, (picture,) in enumerate(table.rows([image])):
        key, label = f"{table.name}:{i}", classes.label(values[table.name][i])
        if label is None:
          yield Entry(key, error=classes.missing)
          continue
        try:
          yield Entry(key, read(picture), label)
        except ValueError as e:
          yield Entry(key, error=str(e))

  def split_of(tables: Sequence[Table]) -> Split:
    count = sum(len(values[table.name]) for table in tables)
    return Split(count, lambda: entries(tables))

  return Listing(
    classes.names,
    {split: split_of(tables) for split, tables in by_split.items()},
    classes.is_multilabel,
    is_regression=bool(options.numbers),
  )


def _label(row: tuple, options: Options):
  """Returns the label in a row: a value, or a list of several."""
  if options.numbers and not isinstance(row[0], list):
    return list(row)
  return row[0]

"""Labels of a data set and columns of a head, matched by name or number."""

import types

import numpy as np
import pytest

from vit_jax import class_names
from vit_jax.class_names import Head, match


def source(names, num_classes=None):
  names = tuple(names) if names else None
  num_classes = num_classes or len(names)
  return types.SimpleNamespace(
    name="pets", num_classes=num_classes, class_names=names
  )


DIGITS = tuple("0123456789")


@pytest.mark.parametrize(
  "names, head_names, columns, text",
  [
    (["a", "b"], ["a", "b"], [0, 1], "2 classes, matched by name; the same"),
    (["b", "a"], ["a", "b"], [1, 0], "2 classes, matched by name; another"),
    (["c", "a"], ["a", "b", "c"], [2, 0], "2 of the head's 3 classes, matched"),
    (None, ["a", "b"], [0, 1], "position alone: the data set 'pets' has no"),
    (["b", "a"], None, [0, 1], "position alone: the head has no names"),
    # TFDS's placeholders are no names, unless the others are the same.
    (DIGITS[:2], ["a", "b"], [0, 1], "position alone: the data set 'pets'"),
    (["b", "a"], DIGITS[:2], [0, 1], "position alone: the head"),
    # Folders are sorted as words.
    (["0", "1", "10", "2"], [*DIGITS, "10"], [0, 1, 10, 2], "by name"),
    # Names that occur twice are no matter where both lists are the same.
    (["x", "x", "b"], ["x", "x", "b"], [0, 1, 2], "by name; the same order"),
  ],
)
def test_columns(names, head_names, columns, text):
  width = len(head_names or columns)
  head = Head(width, tuple(head_names) if head_names else None)
  result = match(source(names, len(columns)), head)
  assert result.columns.dtype == np.int32
  assert result.columns.tolist() == columns
  assert text in result.text


def test_classes_that_are_not_the_heads_are_refused():
  head = Head(5, tuple("abcde"))
  text = "5 are not once in the head: ox, cow, x1, x2 and 1 more; expected .* a"
  with pytest.raises(ValueError, match=text):
    match(source(["a", "ox", "b", "cow", "x1", "x2", "x3"]), head)
  # As many, and one of them another; a name that two columns have.
  for names, head_names in (("abcdx", "abcde"), ("ba", "abb")):
    with pytest.raises(ValueError, match="1 are not"):
      match(source(names), Head(len(head_names), tuple(head_names)))
  with pytest.raises(ValueError, match="with 3 classes, expected at most 2"):
    match(source(None, 3), Head(2))


NUMBERED = ("0", "1", "10", "11", *DIGITS[2:])  # as folders are sorted
LETTERS = tuple("abcdefghijkl")


def folder(names):
  data = source(names)
  data.name = "folder:v2"
  return data


@pytest.mark.parametrize(
  "names, head_names, columns",
  [
    (NUMBERED, None, [0, 1, 10, 11, *range(2, 10)]),
    # ImageNetV2 has some of the numbers in a subset.
    (("10", "3"), None, [10, 3]),
    # Counted from 1, or years: no columns of the head, but in this order.
    (tuple(sorted(map(str, range(1, 13)))), None, [0, 9, 10, 11, *range(1, 9)]),
    (("10", "12", "3"), None, [9, 11, 2]),
    (("2019", "2020"), None, [0, 1]),
    (("1.0", "10.0", "2.0"), None, [1, 10, 2]),  # labels of pandas
  ],
)
def test_folders_named_by_numbers_on_a_head_without_names(
  names, head_names, columns
):
  result = match(folder(names), Head(12, head_names))
  assert result.columns.tolist() == columns
  how = f"matched by their numbers ({names[0]!r} is column {columns[0]})"
  assert f"{how}: the head has no names" in result.text


@pytest.mark.parametrize(
  "names, head_names",
  [
    (NUMBERED, LETTERS),
    (DIGITS, LETTERS),  # in a folder they are names
    (LETTERS, tuple(map(str, range(12)))),
  ],
)
def test_numbers_on_one_side_are_refused(names, head_names):
  head = Head(12, head_names)
  with pytest.raises(ValueError, match="config.evals.NAME.match=position"):
    match(folder(names), head)
  result = match(folder(names), head, by="position")
  expected = map(int, names) if names != LETTERS else range(12)
  assert result.columns.tolist() == list(expected)
  assert result.text.endswith("match=position")
  # TFDS's placeholders stay no names.
  if names == DIGITS:
    assert "position alone" in match(source(names), head).text


def test_imagenet_s_classes_in_words():
  wnids = class_names.imagenet1k()
  names = ["tench, Tinca tinca", "goldfish", *(f"w{i}" for i in range(998))]
  names[134] = names[517] = "crane"
  head = Head(1000, tuple(names))
  assert match(source(wnids), head).columns.tolist() == list(range(1000))
  assert match(source(wnids[7:4:-1]), head).columns.tolist() == [7, 6, 5]
  assert class_names.by_name(["w5"], names).tolist() == [7]
  assert (
    class_names.wnids_of(wnids) == () and class_names.wnids_of(names[:10]) == ()
  )
  with pytest.raises(ValueError, match="not once in the head: cr"):
    match(source(["crane", "goldfish"]), head)

"""Names of classes; columns of a head matched with labels of a data set."""

import importlib.util
import pathlib
import types

import numpy as np
import pytest

from vit_jax import class_names
from vit_jax.class_names import Head, match

DIGITS = tuple("0123456789")
NUMBERED = ("0", "1", "10", "11", *DIGITS[2:])  # as folders are sorted
LETTERS = tuple("abcdefghijkl")


def source(names, num_classes=None, name="pets"):
  names = tuple(names) if names else None
  return types.SimpleNamespace(
    name=name, num_classes=num_classes or len(names), class_names=names
  )


# Names by their number.


def test_names_by_their_number():
  names, google, fall = map(class_names.known, (1000, 21_843, 21_841))
  assert names == class_names.imagenet1k()
  for wnids, number in ((names, 1000), (google, 21_843)):
    assert len(set(wnids)) == len(wnids) == number
    assert list(wnids) == sorted(wnids)
  assert fall == google[:9205] + google[9206:15_027] + google[15_028:]
  assert set(names) - set(google) == {"n04399382"} == {names[850]}
  for number in (999, 1001, 21_842):
    assert class_names.known(number) is None
  assert class_names.readable("n04399382") == "teddy (n04399382)"
  assert class_names.readable("n00000000") == "n00000000"
  for wnid in google:
    word, _, end = class_names.readable(wnid).rpartition(" ")
    assert word and end == f"({wnid})"


@pytest.mark.parametrize(
  "package, file, number",
  [
    ("tensorflow_datasets", "datasets/imagenet2012/labels.txt", 1000),
    pytest.param(
      *("timm", "data/_info/imagenet21k_goog_synsets.txt", 21_843),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *("timm", "data/_info/imagenet22k_synsets.txt", 21_841),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_other_libraries_have_the_same_names(package, file, number):
  spec = importlib.util.find_spec(package)
  folder = pathlib.Path(spec.submodule_search_locations[0])
  words = (folder / file).read_text().split()
  assert tuple(words) == class_names.known(number)


# Labels and columns.


@pytest.mark.parametrize(
  "names, head_names, columns, text",
  [
    ("ab", "ab", [0, 1], "by name; the same"),
    ("ba", "ab", [1, 0], "by name; another"),
    ("ca", "abc", [2, 0], "2 of the head's 3"),
    (None, "ab", [0, 1], "position alone: the data set 'pets' has no"),
    ("ba", None, [0, 1], "position alone: the head has no names"),
    # TFDS's placeholders are no names, unless the others are the same.
    (DIGITS[:2], "ab", [0, 1], "position alone: the data set 'pets'"),
    ("ba", DIGITS[:2], [0, 1], "position alone: the head"),
    # Folders are sorted as words.
    (["0", "1", "10", "2"], [*DIGITS, "10"], [0, 1, 10, 2], "by name"),
    # Names that occur twice are no matter where both lists are the same.
    ("xxb", "xxb", [0, 1, 2], "by name; the same order"),
  ],
)
def test_columns(names, head_names, columns, text):
  width = len(head_names or columns)
  head = Head(width, tuple(head_names) if head_names else None)
  result = match(source(names, len(columns)), head)
  assert result.columns.dtype == np.int32
  assert result.columns.tolist() == columns
  assert text in result.text


@pytest.mark.parametrize(
  "names, head_names, word",
  [
    (["a", "ox", "b", "cow", "x1", "x2", "x3"], "abcde", "ox, cow, x1, x2"),
    ("abcdx", "abcde", "1 are not"),
    ("ba", "abb", "1 are not"),  # a name that two columns have
    ("abc", None, "3 classes, expected at most 2"),
  ],
)
def test_classes_that_are_not_the_heads_are_refused(names, head_names, word):
  head = Head(len(head_names or "ab"), head_names and tuple(head_names))
  with pytest.raises(ValueError, match=word):
    match(source(names), head)


@pytest.mark.parametrize(
  "names, columns",
  [
    (NUMBERED, [0, 1, 10, 11, *range(2, 10)]),
    # ImageNetV2 has some of the numbers in a subset.
    (("10", "3"), [10, 3]),
    # Counted from 1, or years: no columns of the head, but in this order.
    (tuple(sorted(map(str, range(1, 13)))), [0, 9, 10, 11, *range(1, 9)]),
    (("2019", "2020"), [0, 1]),
    (("1.0", "10.0", "2.0"), [1, 10, 2]),  # labels of pandas
  ],
)
def test_folders_named_by_numbers_on_a_head_without_names(names, columns):
  result = match(source(names, name="folder:v2"), Head(12))
  assert result.columns.tolist() == columns
  assert f"{names[0]!r} is column {columns[0]}" in result.text


@pytest.mark.parametrize(
  "names, head_names",
  [
    (NUMBERED, LETTERS),
    (DIGITS, LETTERS),  # in a folder they are names
    (LETTERS, tuple(map(str, range(12)))),
  ],
)
def test_numbers_on_one_side_are_refused(names, head_names):
  head, folder = Head(12, head_names), source(names, name="folder:v2")
  with pytest.raises(ValueError, match="config.evals.NAME.match=position"):
    match(folder, head)
  result = match(folder, head, by="position")
  expected = map(int, names) if names != LETTERS else range(12)
  assert result.columns.tolist() == list(expected)


def test_imagenet_s_classes_in_words():
  wnids = class_names.imagenet1k()
  names = ["tench, Tinca tinca", "goldfish", *(f"w{i}" for i in range(998))]
  names[134] = names[517] = "crane"
  head = Head(1000, tuple(names))
  assert match(source(wnids), head).columns.tolist() == list(range(1000))
  assert match(source(wnids[7:4:-1]), head).columns.tolist() == [7, 6, 5]
  assert class_names.by_name(["w5"], names).tolist() == [7]
  with pytest.raises(ValueError, match="not once in the head: cr"):
    match(source(["crane", "goldfish"]), head)

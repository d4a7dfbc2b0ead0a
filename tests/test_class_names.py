"""Names of classes: ours, TFDS's and timm's."""

import importlib.util
import pathlib

import pytest

from vit_jax import class_names


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


def test_words():
  assert class_names.readable("n04399382") == "teddy (n04399382)"
  assert class_names.readable("n00000000") == "n00000000"
  for wnid in class_names.known(21_843):
    word, _, end = class_names.readable(wnid).rpartition(" ")
    assert word and end == f"({wnid})"


def _words_of(package, file):
  spec = importlib.util.find_spec(package)
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return tuple((folder / file).read_text().split())


def test_tfds_has_the_same_names():
  file = "datasets/imagenet2012/labels.txt"
  assert _words_of("tensorflow_datasets", file) == class_names.imagenet1k()


@pytest.mark.slow
def test_timm_has_the_same_names():
  for name, number in (("21k_goog", 21_843), ("22k", 21_841)):
    names = _words_of("timm", f"data/_info/imagenet{name}_synsets.txt")
    assert names == class_names.known(number)

"""Names of classes, and the lists of others that the sentences rely on."""

import importlib.util
import pathlib

import pytest

from vit_jax import class_names


def test_imagenet1k():
  names = class_names.imagenet1k()
  assert len(set(names)) == len(names) == 1000
  assert list(names) == sorted(names)
  assert names[0] == "n01440764" and names[-1] == "n15075141"
  assert names[850] == "n04399382"  # which the sentence on 21,842 names
  assert class_names.known(1000) == names


def test_imagenet21k():
  google, fall = map(class_names.known, (21_843, 21_841))
  assert len(set(google)) == len(google) == 21_843
  assert list(google) == sorted(google)
  assert google[9205] == "n03931044" and google[15_027] == "n09859684"
  assert fall == google[:9205] + google[9206:15_027] + google[15_028:]
  assert set(class_names.known(1000)) - set(google) == {"n04399382"}


@pytest.mark.parametrize("num_classes", [999, 1001, 21_842])
def test_other_widths_have_no_names(num_classes):
  assert class_names.known(num_classes) is None


def test_words():
  assert class_names.readable("n04399382") == "teddy (n04399382)"
  assert class_names.readable("n00000000") == "n00000000"
  for wnid in class_names.known(21_843):
    word, _, end = class_names.readable(wnid).rpartition(" ")
    assert word and end == f"({wnid})"


def test_tfds_has_the_same_names():
  spec = importlib.util.find_spec("tensorflow_datasets")
  folder = pathlib.Path(spec.submodule_search_locations[0])
  text = (folder / "datasets/imagenet2012/labels.txt").read_text()
  assert class_names.imagenet1k() == tuple(text.split())


@pytest.mark.slow
def test_the_lists_of_timm_say_so():
  spec = importlib.util.find_spec("timm")
  folder = pathlib.Path(spec.submodule_search_locations[0]) / "data/_info"
  google, fall, focal = (
    (folder / f"imagenet{name}_synsets.txt").read_text().split()
    for name in ("21k_goog", "22k", "22k_ms")
  )
  assert [len(x) for x in (google, fall, focal)] == [21_843, 21_841, 21_842]
  assert tuple(google) == class_names.known(21_843)
  assert tuple(fall) == class_names.known(21_841)
  assert focal[:1000] == list(class_names.imagenet1k())
  assert focal[1000:] == sorted(focal[1000:])
  assert set(focal) - set(google) == {"n04399382"} == {focal[850]}
  assert set(focal) - set(fall) == {"n04399382"}
  assert not any(a == b for a, b in zip(focal, fall, strict=False))

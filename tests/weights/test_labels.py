"""Names of classes, and the lists of others that the sentences rely on."""

import importlib.util
import pathlib

import pytest

from vit_jax.weights import labels


def test_imagenet1k():
  names = labels.imagenet1k()
  assert len(set(names)) == len(names) == 1000
  assert list(names) == sorted(names)
  assert names[0] == "n01440764" and names[-1] == "n15075141"
  assert names[850] == "n04399382"  # which the sentence on 21,842 names
  assert labels.known(1000) == names


@pytest.mark.parametrize("num_classes", [999, 1001, 21_841, 21_842, 21_843])
def test_only_a_thousand_names_are_known(num_classes):
  assert labels.known(num_classes) is None


def test_without_tfds_no_names(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert labels.imagenet1k() is None
  assert labels.known(1000) is None


def test_without_the_file_no_names(monkeypatch, tmp_path):
  monkeypatch.setattr(labels, "_LABELS", str(tmp_path / "nothing.txt"))
  assert labels.imagenet1k() is None


@pytest.mark.parametrize(
  "num_classes, words",
  [
    (1000, ["1,000", "ImageNet-1k", "sorted wnids", "n01440764"]),
    (21_841, ["21,841", "fall 2011", "sorted wnids", "from 9205 on"]),
    (21_842, ["21,842", "FocalNet", "850, n04399382", "not those of 21,843"]),
    (
      21_843,
      ["21,843", "imagenet21k and AugReg", "9205 (n03931044)", "15027"],
    ),
  ],
)
def test_describe(num_classes, words):
  text = labels.describe(num_classes)
  assert all(word in text for word in words)
  assert text.endswith(".") and text.count(". ") == 0  # one sentence
  assert labels.describe(num_classes + 5) is None


@pytest.mark.slow
def test_the_lists_of_timm_say_so():
  spec = importlib.util.find_spec("timm")
  folder = pathlib.Path(spec.submodule_search_locations[0]) / "data/_info"
  google, fall, focal = (
    (folder / f"imagenet{name}_synsets.txt").read_text().split()
    for name in ("21k_goog", "22k", "22k_ms")
  )
  assert [len(x) for x in (google, fall, focal)] == [21_843, 21_841, 21_842]
  assert google == sorted(google) and fall == sorted(fall)
  assert google[9205] == "n03931044" and google[15_027] == "n09859684"
  assert fall == google[:9205] + google[9206:15_027] + google[15_028:]
  assert focal[:1000] == list(labels.imagenet1k())
  assert focal[1000:] == sorted(focal[1000:])
  assert set(focal) - set(google) == {"n04399382"} == {focal[850]}
  assert set(focal) - set(fall) == {"n04399382"}
  assert not any(a == b for a, b in zip(focal, fall, strict=False))

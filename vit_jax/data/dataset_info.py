"""Sizes and classes of common data sets, known without their records."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.data import vtab


class Info(NamedTuple):
  """Classes of a data set, records per split, and a typical image."""

  num_classes: int
  splits: Mapping[str, int]
  image: str = "jpeg"  # or "png"
  size: tuple[int, int] = (256, 320)
  is_multilabel: bool = False  # any number of classes per image
  is_regression: bool = False  # numbers to predict
  names: tuple[str, ...] | None = None  # names of the numbers; None for classes


# By name in TFDS, or by prefix for all data sets with it. Sources: the TFDS
# catalogue; for imagenet21k, image-net.org's number of images and the number of
# classes of the published checkpoints. TFDS has no imagenet21k; ours,
# `builders/imagenet21k.py`, has one split "full", of which big_vision trains on
# full[51200:] and validates on full[25600:51200].
DATASETS = {
  "imagenet2012": Info(1000, {"train": 1_281_167, "validation": 50_000}),
  "imagenet2012_real": Info(1000, {"validation": 50_000}, is_multilabel=True),
  "imagenet21k": Info(21_843, {"full": 14_197_122}),
  "imagenet_v2": Info(1000, {"test": 10_000}),
  "imagenet_a": Info(1000, {"test": 7500}),
  "imagenet_r": Info(1000, {"test": 30_000}),
  "imagenet_sketch": Info(1000, {"test": 50_889}),
  "cifar10": Info(10, {"train": 50_000, "test": 10_000}, "png", (32, 32)),
  "cifar100": Info(100, {"train": 50_000, "test": 10_000}, "png", (32, 32)),
  "caltech101": Info(102, {"train": 3060, "test": 6084}),
  "cars196": Info(196, {"train": 8144, "test": 8041}),
  "dtd": Info(47, {"train": 1880, "validation": 1880, "test": 1880}),
  "uc_merced": Info(21, {"train": 2100}),
  "oxford_iiit_pet": Info(37, {"train": 3680, "test": 3669}),
  "oxford_flowers102": Info(
    102, {"train": 1020, "validation": 1020, "test": 6149}
  ),
  "digits": Info(10, {"train": 1297, "test": 500}, "png", (8, 8)),
  # That of glyphs depends on its options: see `fake.dataset_info`.
  "glyphs": Info(0, {}, "png"),
  **dict.fromkeys(
    ("folder:", "csv:", "parquet:"), Info(10, {"train": 1000, "val": 100})
  ),
  "images:": Info(0, {"train": 1000}),
  **{
    vtab.PREFIX + name: Info(t.num_classes, t.split_sizes, t.image, t.size)
    for name, t in vtab.TASKS.items()
  },
}

# TFDS's syntax after a colon: "cifar10:3.0.2", "cifar10:3.*.*".
_VERSION = re.compile(r"(\d+|\*)(\.(\d+|\*)){2}|experimental_latest")


def prefix_of(dataset: str) -> str:
  """Returns the prefix of a data set's name that decides how to open it.

  The colon is included; "" for a name of TFDS.

  Example:
    >>> [prefix_of(n) for n in ("folder:/a:b", "glyphs/size=32", "mnist:3.0.1")]
    ['folder:', '', '']
  """
  name, colon, rest = dataset.partition(":")
  return name + colon if colon and not _VERSION.fullmatch(rest) else ""


def lookup(dataset: str) -> Info | None:
  """Returns the entry of `DATASETS`, for any options and version."""
  prefix = prefix_of(dataset)
  name = prefix or dataset.split("/")[0].split(":")[0]
  return DATASETS.get(dataset) or DATASETS.get(name)

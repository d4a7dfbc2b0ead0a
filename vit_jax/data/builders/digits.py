"""TFDS builder `digits`: 1,797 handwritten digits that scikit-learn ships."""

import collections.abc
import hashlib

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data.builders import embedded

_TEST_PER_CLASS = 50


def load() -> tuple[np.ndarray, np.ndarray]:
  """Returns the images, uint8[1797, 8, 8] with ink at 255, and their labels.

  Source: E. Alpaydin and C. Kaynak, Optical recognition of handwritten digits,
  UCI repository, 1998; the 1,797 digits are those of its test file. A value
  is the number of inked pixels, 0 to 16, of a 4x4 block of a 32x32 scan.
  """
  from sklearn import (
    datasets,  # Here, because it takes a second to import.
  )

  bunch = datasets.load_digits()
  images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
  return images, bunch.target.astype(np.int64)


def split_indices(labels: np.ndarray) -> dict[str, list[int]]:
  """Divides the records: 50 of each class to `test`, the others to `train`.

  Within a class the records are ordered by the SHA-256 of their index, which
  does not depend on the version of a random generator, and the first 50 are
  taken. The data do not name the writers, so a writer may be in both splits.
  """
  splits = {"train": [], "test": []}
  for label in range(10):
    ordered = sorted(
      np.flatnonzero(labels == label).tolist(),
      key=lambda index: hashlib.sha256(f"digits/{index}".encode()).digest(),
    )
    splits["test"] += ordered[:_TEST_PER_CLASS]
    splits["train"] += ordered[_TEST_PER_CLASS:]
  return {name: sorted(indices) for name, indices in splits.items()}


class Digits(embedded.EmbeddedBuilder):
  """Real handwritten digits, 8x8 pixels: 1,297 to train on, 500 to test."""

  VERSION = tfds.core.Version("1.1.0")
  RELEASE_NOTES = {"1.1.0": "Records can be read by number (array_record)."}

  def _info(self) -> tfds.core.DatasetInfo:
    return embedded.EmbeddedInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
          "label": tfds.features.ClassLabel(names=list("0123456789")),
        }
      ),
      supervised_keys=("image", "label"),
      homepage="https://archive.ics.uci.edu/dataset/80",
    )

  def _split_generators(self, dl_manager) -> dict[str, object]:
    del dl_manager  # Nothing to download.
    images, labels = load()
    return {
      name: self._generate_examples(images, labels, indices)
      for name, indices in split_indices(labels).items()
    }

  def _generate_examples(
    self, images: np.ndarray, labels: np.ndarray, indices: list[int]
  ) -> collections.abc.Iterator[tuple[int, dict]]:
    for index in indices:
      yield (
        index,
        {"image": embedded.png(images[index]), "label": int(labels[index])},
      )

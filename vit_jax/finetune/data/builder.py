"""The TFDS builder of a data set that a user imports."""

import tensorflow_datasets as tfds

from vit_jax.data import numbers
from vit_jax.data.builders.image_builder import ImageBuilder
from vit_jax.finetune.data.imports.listing import Listing


class OwnData(ImageBuilder, skip_registration=True):
  """A data set with a user's name; reading it does not need this class.

  Args:
    name: Name of the data set.
    listing: Its classes and splits.
    description: Where it comes from.
    **kwargs: Arguments of the base class.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(
    self, *, name: str, listing: Listing, description: str, **kwargs
  ):
    self.name = name
    self._listing, self._description = listing, description
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    names = list(self._listing.class_names)
    if self._listing.is_regression:
      return self._info_of(self._description, numbers.feature(names))
    label = tfds.features.ClassLabel(names=names)
    return self._info_of(self._description, label, self._listing.is_multilabel)

  def _split_generators(self, dl_manager) -> dict[str, object]:
    del dl_manager  # Nothing to download.
    return {
      name: self._generate_examples(name, split)
      for name, split in self._listing.splits.items()
    }

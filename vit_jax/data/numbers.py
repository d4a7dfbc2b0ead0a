"""The TFDS feature for regression targets."""

from collections.abc import Sequence

import numpy as np
import tensorflow_datasets as tfds

_SEPARATOR = "\n"  # between names in the documentation of the feature


def feature(names: Sequence[str]) -> tfds.features.Tensor:
  """Returns the feature with one number for each name."""
  doc = _SEPARATOR.join(names)
  return tfds.features.Tensor(shape=(len(names),), dtype=np.float32, doc=doc)


def names_of(known: tfds.features.FeatureConnector) -> tuple[str, ...]:
  """Returns the names of a feature's numbers; () if it has none.

  A float32 feature of another program, a number or a vector, has no names. They
  are then "label", or "label 0", "label 1", ...

  Example:
    >>> names_of(feature(["width", "height"]))
    ('width', 'height')
    >>> names_of(tfds.features.Tensor(shape=(), dtype=np.float32))
    ('label',)
  """
  is_tensor = isinstance(known, tfds.features.Tensor)
  if not is_tensor or known.np_dtype != np.float32:
    return ()
  if len(known.shape) > 1 or not all(known.shape):
    return ()
  count = known.shape[0] if known.shape else 1
  names = tuple((known.doc.desc or "").split(_SEPARATOR))
  if len(names) == count and all(names):
    return names
  return ("label",) if count == 1 else tuple(f"label {i}" for i in range(count))

"""The type of a batch: the contract between the input and the step.

Dimension letters, the same everywhere: b images, h height and w width in
pixels, c colour channels, n tokens, d width of a token.
"""

from typing import NotRequired, TypedDict

import numpy as np


class DataError(ValueError):
  """Records that cannot be used; the message says which, and what to do."""


class Batch(TypedDict):
  """One batch of this process, as numpy.

  image: uint8 [b, h, w, c], c = 3, straight from the decoder (0 to 255).
  label: int32 [b], the class; or float32 [b, classes], one or more classes.
  mask: bool [b]; False marks a row that must not count: padding at the end of
    an evaluation, or an image that could not be decoded.
  index: int64 [b], number of the record in its split; -1 for padding.
  """

  image: np.ndarray
  label: np.ndarray
  mask: np.ndarray
  index: NotRequired[np.ndarray]


def normalise(images):
  """Maps 0..255 to -1..1, as the published checkpoints expect.

  Args:
    images: uint8 [b, h, w, c], of numpy or of jax.

  Returns:
    float32 [b, h, w, c].
  """
  return images.astype(np.float32) / 127.5 - 1.0

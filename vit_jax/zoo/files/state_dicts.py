"""The table of series of other libraries' models, by the names of arrays."""

import dataclasses

from vit_jax.weights.weights_file import StateDict, Weights, unknown_names
from vit_jax.zoo.files import hf, key_prefixes, openclip, series, timm

# The first one whose marks fit reads the file.
SERIES = (timm.SERIES, hf.SERIES, openclip.SERIES)


def read(file: StateDict) -> Weights:
  """Returns the weights of a file under the names of a PyTorch library.

  Raises:
    ValueError: No series has such names, or the arrays fit no model.
  """
  openclip.refuse_head(file.arrays)
  arrays, notes = key_prefixes.without(file.arrays)
  of = next((s for s in SERIES if s.marks(arrays)), None)
  if of is None:
    raise ValueError(unknown_names(file.path, arrays))
  if of is timm.SERIES and openclip.has_trunk(file.arrays):
    of = openclip.TRUNK_SERIES
  weights = series.read(of, file._replace(arrays=arrays))
  return dataclasses.replace(weights, notes=(*notes, *weights.notes))

"""Reads arrays under the names of a PyTorch library."""

import dataclasses

from vit_jax.weights.weights_file import StateDict, Weights, unknown_names
from vit_jax.zoo.files import (
  hf,
  hf_names,
  key_prefixes,
  openclip,
  timm,
  timm_file,
)

READERS = (
  (timm.looks_like, timm_file.read),
  (hf_names.looks_like, hf.read),
  (openclip.looks_like, openclip.read),
)


def read(file: StateDict) -> Weights:
  """Returns the weights of a file, by the first reader that knows the names.

  Raises:
    ValueError: No reader knows the names, or the arrays fit no model.
  """
  openclip.refuse_head(file.arrays)
  arrays, notes = key_prefixes.without(file.arrays)
  for looks_like, read_file in READERS:
    if looks_like(arrays):
      if read_file is timm_file.read and openclip.has_trunk(file.arrays):
        read_file = openclip.read_trunk
      weights = read_file(file._replace(arrays=arrays))
      return dataclasses.replace(weights, notes=(*notes, *weights.notes))
  raise ValueError(unknown_names(file.path, arrays))

"""Reads a batch with the new operation."""

import numpy as np

from vit_jax.config.preprocessing import image_size
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources import open_source

OPS = "decode|resize((4, 6))|flip_ud"
assert image_size(OPS) == (4, 6)
source = open_source("cifar10", "train", fake=True)
plain, flipped = (
  next(train_batches(source, ops, batch_size=64, seed=0))["image"]
  for ops in (OPS.removesuffix("|flip_ud"), OPS)
)
is_flipped = (flipped == plain[:, ::-1]).all((1, 2, 3))
assert 16 < is_flipped.sum() < 48
np.testing.assert_array_equal(flipped[~is_flipped], plain[~is_flipped])

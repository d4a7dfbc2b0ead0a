"""Converts a model to the new format, and back, without a change."""

import tempfile

import jax
import numpy as np

import vit_jax
from vit_jax.commands import convert

vit = vit_jax.load("tests/data/vit_token.weights.npz", verbose=False)
with tempfile.TemporaryDirectory() as folder:
  path = folder + "/dotted.npz"
  convert.main(["tests/data/vit_token.weights.npz", path, "--to=dotted"])
  again = vit_jax.load(path, verbose=False)
jax.tree.map(np.testing.assert_array_equal, again.params, vit.params)

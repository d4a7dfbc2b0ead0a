"""A small model, and where its formats lie."""

import math

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.models.posemb import sincos2d
from vit_jax.weights.google import POS_EMBEDDING

SUFFIX = {"orbax": "", "npz": ".npz", "timm": ".safetensors", "hf": ""}


def flat(vit):
  return {
    k: np.asarray(v) for k, v in flatten_dict(vit.params, sep="/").items()
  }


def assert_same(again, vit):
  """Bit for bit; a table that was not there before holds the same numbers."""
  got, expected = flat(again), flat(vit)
  if again.config.name == "vit" and again.config.posemb == "learn":
    table = got.pop(POS_EMBEDDING)
    grid = tuple(side // 8 for side in again.image_size)
    own = {
      "sincos2d": sincos2d(*grid, table.shape[-1])[None],
      "none": np.zeros((1, math.prod(grid), table.shape[-1]), np.float32),
      "learn": expected.pop(POS_EMBEDDING, None),
    }[vit.config.posemb]
    rows = table.shape[1] - own.shape[1]  # one of zeros for cls
    assert rows == (
      again.config.pool == "token"
      and again.config.cls_row
      and not (vit.config.cls_row and vit.config.posemb == "learn")
    )
    np.testing.assert_array_equal(table[:, rows:], own)
    assert not table[:, :rows].any()
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, path)

"""A new library's models are a `Series`: a row of functions and a key table."""

import numpy as np
import pytest
from foreign import random_params, translate

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files.series import Series, Stated
from vit_jax.zoo.files.torch_layout import Row

MODEL = model_config(
  variant="B/8", width=32, depth=1, mlp_dim=64, num_heads=2, gelu="erf"
)
PARAMS = random_params(MODEL, 3, (16, 16))


def config(file):
  about = dict(file.config)
  heads = about.pop("heads", None)
  return Stated("own.json", about, heads, about)


def rows(arrays, stated):
  return [Row(name.replace("/", "."), name) for name in PARAMS]


OWN = Series(
  "own",
  "a library",
  lambda names: "embedding.kernel" in names,
  config,
  rows,
  lambda arrays, params, stated: ({"gelu": "erf"}, []),
  lambda params, options, stated: {"act": ("gelu",)},
  lambda weights, stated, file: weights,
  lambda arrays: (None, "the number of heads is unknown."),
  ignored=("dropout",),
)
ARRAYS = {name.replace("/", "."): array for name, array in PARAMS.items()}


def test_a_series_is_read():
  about = {"heads": 2, "act": "gelu", "dropout": 0.1}
  params, options, _ = translate(OWN, ARRAYS, config=about)
  assert weights.identify(params, options) == MODEL
  for name, array in PARAMS.items():
    np.testing.assert_array_equal(params[name], array, name)


@pytest.mark.parametrize(
  "about, changes, error",
  [
    ({"heads": 2}, {POS_EMBEDDING: None}, "pos_embedding: missing, expected"),
    ({"heads": 2}, {"q_norm": 1}, "got 1 arrays that no model .*: 'q_norm'"),
    ({}, {}, "the number of heads is unknown"),
    ({"act": "relu"}, {}, "own.json: act: got 'relu', expected 'gelu', which"),
    ({"act": "gelu", "window": 7}, {}, "own.json: window: got 7, a key that"),
  ],
)
def test_what_is_missing_unknown_or_contradicts(about, changes, error):
  changes = {n.replace("/", "."): value for n, value in changes.items()}
  arrays = {k: v for k, v in ARRAYS.items() if k not in changes}
  arrays |= {k: np.zeros(3, "f") for k, v in changes.items() if v is not None}
  with pytest.raises(ValueError, match=f"(?s)weights of a library: .*{error}"):
    translate(OWN, arrays, config=about)

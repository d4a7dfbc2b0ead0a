"""Names of BiT's own files, in both directions."""

import doctest
import pathlib

import numpy as np
import pytest

from vit_jax import weights
from vit_jax.weights import bit
from vit_jax.weights.weights_file import lazy

DATA = pathlib.Path(__file__).parents[1] / "data"


def params():
  """Parameters of a ResNet V2: units (1, 2, 1), half width, 7 classes."""
  result = weights.read(DATA / "bit_v2.weights.npz")
  return {k: np.asarray(v) for k, v in result.params.items()}


def test_what_is_written_is_read_as_it_was(tmp_path):
  expected = params()
  written = bit.write(expected)
  assert written["resnet/head/conv2d/kernel"].shape == (1, 1, 512, 7)
  np.savez(tmp_path / "BiT-M.npz", **written)
  result = weights.read(tmp_path / "BiT-M.npz")
  assert result.params.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(result.params[name], array, name)
  assert (result.format, result.options) == ("bit", {"root_pad": "zero"})
  model = weights.identify(result.params, result.options)
  assert (model.name, model.stage_blocks) == ("bit", (1, 2, 1))


@pytest.mark.parametrize(
  "published, ours",
  [
    ("root_block/standardized_conv2d/kernel", "conv_root/kernel"),
    (
      "block4/unit12/c/standardized_conv2d_52/kernel",
      "block4/unit12/conv3/kernel",
    ),
    (
      "block2/unit01/a/proj/standardized_conv2d/kernel",
      "block2/unit1/conv_proj/kernel",
    ),
    ("block3/unit23/b/group_norm/gamma", "block3/unit23/gn2/scale"),
    ("group_norm/beta", "norm-pre-head/bias"),
    ("head/conv2d/bias", "head/bias"),
    ("block1/unit01/d/group_norm/beta", None),
    ("block1/unit01/a/conv2d/kernel", None),
  ],
)
def test_names(published, ours):
  assert bit.rename(f"resnet/{published}") == ours


def test_published_names_have_two_digits():
  unit = "resnet/block3/unit02/"
  written = bit.write(
    {
      "block3/unit2/conv2/kernel": np.zeros((3, 3, 4, 4)),
      "block3/unit2/gn3/bias": np.zeros(4),
      "block3/unit2/conv_proj/kernel": np.zeros((1, 1, 4, 4)),
    }
  )
  assert written.keys() == {
    unit + "b/standardized_conv2d/kernel",
    unit + "c/group_norm/beta",
    unit + "a/proj/standardized_conv2d/kernel",
  }


def test_other_names_are_refused():
  name = "resnet/block1/unit01/a/standardized_conv2d/kernel"
  with pytest.raises(ValueError) as e:
    bit.read({k: lazy(np.zeros(3)) for k in (name, "momentum", "extra")})
  assert str(e.value) == ("got 'extra', 'momentum', not in a BiT file.")
  assert not bit.looks_like(["block1/unit1/conv1/kernel"])


def test_examples_in_docstrings():
  failed, attempted = doctest.testmod(bit)
  assert attempted and not failed

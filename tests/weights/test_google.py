"""Names of Google's files: three generations, odd arrays, both directions."""

import doctest
import pathlib

import numpy as np
import pytest

from vit_jax import weights
from vit_jax.weights import google
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.weights_file import lazy

DATA = pathlib.Path(__file__).parents[1] / "data"
PUBLISHED = sorted(
  p.name.split(".")[0]
  for p in DATA.glob("*.weights.npz")
  if p.name.startswith(("vit_", "hybrid_", "bv_", "bit_"))
)


def arrays(**params):
  return {k: lazy(np.asarray(v)) for k, v in params.items()}


def written(params, **options):
  return google.write({k: np.asarray(v) for k, v in params.items()}, **options)


def published(name):
  return open_npz(DATA / f"{name}.weights.npz")


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_as_it_was(name):
  result = published(name)
  assert google.looks_like(result)
  params, options = google.read(result)
  file = written(params, is_big_vision=name.startswith("b"))
  assert google.looks_like(file)
  again, options_again = google.read(arrays(**file))
  assert options_again == options
  assert again.keys() == params.keys()
  for path, array in params.items():
    np.testing.assert_array_equal(again[path], array, path)


@pytest.mark.parametrize(
  "name, is_big_vision",
  [
    ("vit_token_prelogits", False),
    ("hybrid_r", False),
    ("bv_map", True),
    ("bit_v1", True),
  ],
)
def test_written_names_and_shapes_are_the_published_ones(name, is_big_vision):
  result = published(name)
  params, _ = google.read(result)
  file = written(params, is_big_vision=is_big_vision)
  assert {k: v.shape for k, v in file.items()} == {
    k: v.shape for k, v in result.items()
  }


def test_linen_names_become_those_of_the_paper_s_files():
  params, _ = google.read(published("vit_linen_names"))
  expected = {n for n in published("vit_token") if "encoderblock_2" not in n}
  assert written(params).keys() == expected


def test_the_tower_of_images_is_found_beside_that_of_texts(tmp_path):
  """SigLIP of big_vision has both: img, txt, temperature t, bias b."""
  file, path = published("bv_map"), tmp_path / "siglip.npz"
  two_towers = {
    n.replace("params/", "params/img/"): np.asarray(a) for n, a in file.items()
  }
  texts = {"params/b": 0.0, "params/t": 1.0, "params/txt/head/bias": [0.0]}
  np.savez(path, **two_towers, **texts)
  expected, result = google.read(file)[0], weights.read(path)
  assert result.params.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(result.params[name], array, name)
  assert weights.identify(result.params, result.options).pool == "map"
  assert result.notes[0] == (
    "left out: 'params/b', 'params/t', 'params/txt/head/bias', which only texts"
    " need."
  )


def test_stacked_blocks_are_taken_apart():
  result = published("bv_scan")
  params, _ = google.read(result)
  name = "Transformer/encoderblock{}/MlpBlock_0/Dense_0/kernel"
  stacked = np.asarray(result["params/" + name.format("")])
  assert len(stacked) == 2
  for i, expected in enumerate(stacked):
    got = params[name.format(f"_{i}")]
    assert got.shape == (48, 96)
    np.testing.assert_array_equal(got, expected)
  assert not any("encoderblock/" in n for n in params)
  with pytest.raises(ValueError, match="got a scalar, expected one array a bl"):
    google.read(arrays(**{name.format(""): 3.0}))


def test_norms_of_four_dimensions_are_flattened():
  params, _ = google.read(
    arrays(**{"gn_root/scale": np.arange(4.0).reshape(1, 1, 1, 4)})
  )
  assert params["gn_root/scale"].shape == (4,)
  np.testing.assert_array_equal(params["gn_root/scale"], np.arange(4.0))
  assert written(params)["gn_root/scale"].shape == (1, 1, 1, 4)


@pytest.mark.parametrize(
  "published, ours",
  [
    ("pos_embedding", google.POS_EMBEDDING),
    (
      "Transformer/encoderblock_11/MultiHeadDotProductAttention_1/out/bias",
      "Transformer/encoderblock_11/MultiHeadDotProductAttention_0/out/bias",
    ),
    (
      "Transformer/encoderblock_3/MlpBlock_3/Dense_0/bias",
      "Transformer/encoderblock_3/MlpBlock_0/Dense_0/bias",
    ),
    ("root_block/conv_root/kernel", "conv_root/kernel"),
    ("block2/unit01/conv3/kernel", "block2/unit1/conv3/kernel"),
  ],
)
def test_names(published, ours):
  assert google.rename(published) == ours


@pytest.mark.parametrize("prefix", ["opt/target/", "params/"])
def test_moments_are_left_out(prefix):
  params, _ = google.read(
    arrays(
      **{
        prefix + "cls": np.ones((1, 1, 4), "f"),
        "opt/state/step": 7,
        "opt/param_states/cls/grad_ema": np.ones((1, 1, 4), "f"),
      }
    )
  )
  assert params.keys() == {"cls"}


def test_two_arrays_of_one_name_are_refused():
  block = "Transformer/encoderblock_0/LayerNorm_"
  with pytest.raises(ValueError) as e:
    google.read(
      arrays(**{block + "1/scale": np.ones(4), block + "2/scale": np.ones(4)})
    )
  assert str(e.value) == (
    f"got '{block}2/scale' and another array for '{block}1/scale'."
  )


def test_examples_in_docstrings():
  failed, attempted = doctest.testmod(google)
  assert attempted and not failed

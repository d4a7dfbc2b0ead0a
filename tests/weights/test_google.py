"""Published files: logits of the original codes, names, odd arrays."""

import doctest
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import weights
from vit_jax.models.vit import ViT
from vit_jax.weights import google

DATA = pathlib.Path(__file__).parents[1] / "data"
SIZE = dict(num_classes=11, patch=8, width=48, mlp_dim=96)
PARITY = {
  "vit_token": dict(depth=3, scan=True),
  "vit_token_prelogits": dict(pre_logits=True),
  "vit_gap": dict(num_heads=3, pool="gap"),
  "vit_linen_names": dict(),
  "bv_gap_sincos2d_rep": dict(pool="gap", posemb="sincos2d", pre_logits=True),
  "bv_token": dict(),
  "bv_map": dict(pool="map"),
  "bv_scan": dict(pool="gap"),
}


@pytest.mark.parametrize("name", PARITY)
def test_logits_are_those_of_the_original_code(name):
  model = ViT(**SIZE | dict(depth=2, num_heads=4) | PARITY[name])
  io = np.load(DATA / f"{name}.io.npz")
  image = jnp.asarray(io["image"])
  target = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  has_cls_row = model.pool == "token"
  params, report = weights.adapt(
    weights.read(DATA / f"{name}.weights.npz"),
    target,
    grid=(4, 4),
    has_cls_row=has_cls_row,
  )
  assert not (report.resized or report.reinitialised or report.ignored)
  logits, out = jax.jit(model.apply)({"params": params}, image)
  # Logits reach 6. Some 20 layers, each rounding at 6e-8 of its values in
  # another order of sums: 2e-6 was the largest difference seen.
  np.testing.assert_allclose(logits, io["logits"], rtol=2e-6, atol=4e-6)
  if "pre_logits" in io:
    np.testing.assert_allclose(
      out["pre_logits"], io["pre_logits"], rtol=2e-6, atol=4e-6
    )


def test_read_says_what_it_knows():
  found = weights.read(DATA / "vit_token_prelogits.weights.npz")
  assert found.metadata == {
    "format": "npz",
    "path": str(DATA / "vit_token_prelogits.weights.npz"),
    "grid": None,
    "has_cls_row": True,
    "pre_logits": True,
  }
  found = weights.read(DATA / "bv_gap_sincos2d_rep.weights.npz", grid=(2, 8))
  assert found.metadata["grid"] == (2, 8)
  assert not found.metadata["has_cls_row"]


def test_a_table_without_the_class_token_s_row_gets_zeros():
  found = weights.read(DATA / "bv_token.weights.npz")
  table = found.params[google.POS_EMBEDDING]
  with np.load(DATA / "bv_token.weights.npz") as file:
    np.testing.assert_array_equal(table[:, 1:], file["params/pos_embedding"])
  assert not table[:, 0].any()


def test_written_names_are_those_of_the_paper_s_files(tmp_path):
  found = weights.read(DATA / "vit_linen_names.weights.npz")
  params, _ = weights.adapt(
    found, _target(pool="token"), grid=(4, 4), has_cls_row=True
  )
  google.write(tmp_path / "out.npz", params)
  with np.load(DATA / "vit_token.weights.npz") as file:
    published = {n for n in file.files if "encoderblock_2" not in n}
  with np.load(tmp_path / "out.npz") as file:
    assert set(file.files) == published
  again = google.read(tmp_path / "out.npz")
  assert again.keys() == found.params.keys()
  for name, array in found.params.items():
    np.testing.assert_array_equal(again[name], array)


def _target(**options):
  model = ViT(**SIZE | dict(depth=2, num_heads=4) | options)
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


@pytest.mark.parametrize(
  "published, ours",
  [
    ("cls", "cls"),
    ("pos_embedding", google.POS_EMBEDDING),
    ("Transformer/pos_embedding", google.POS_EMBEDDING),
    (google.POS_EMBEDDING, google.POS_EMBEDDING),
    (
      "Transformer/encoderblock/MlpBlock_0/Dense_1/bias",
      "Transformer/encoderblock/MlpBlock_0/Dense_1/bias",
    ),
    (
      "Transformer/encoderblock_11/MultiHeadDotProductAttention_1/out/bias",
      "Transformer/encoderblock_11/MultiHeadDotProductAttention_0/out/bias",
    ),
    ("MAPHead_0/LayerNorm_0/scale", "MAPHead_0/LayerNorm_0/scale"),
  ],
)
def test_names(published, ours):
  assert google.rename(published) == ours


@pytest.mark.parametrize("prefix", ["opt/target/", "params/"])
def test_moments_are_left_unread(tmp_path, prefix):
  np.savez(
    tmp_path / "state.npz",
    **{
      prefix + "cls": np.ones((1, 1, 4), "f"),
      "opt/state/step": np.array(7),
      "opt/param_states/cls/grad_ema": np.ones((1, 1, 4), "f"),
    },
  )
  assert google.read(tmp_path / "state.npz").keys() == {"cls"}


def test_bfloat16_is_recovered(tmp_path):
  array = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(tmp_path / "x.npz", cls=np.asarray(array))
  got = google.read(tmp_path / "x.npz")["cls"]
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, array)


def test_pickles_are_refused(tmp_path):
  np.savez(tmp_path / "x.npz", cls=np.array([print, 1], object))
  with pytest.raises(ValueError, match="got pickled objects in 'cls'"):
    google.read(tmp_path / "x.npz")


def test_two_arrays_of_one_name_are_refused(tmp_path):
  block = "Transformer/encoderblock_0/LayerNorm_"
  np.savez(
    tmp_path / "x.npz",
    **{block + "1/scale": np.ones(4), block + "2/scale": np.ones(4)},
  )
  with pytest.raises(ValueError, match="that are both .*LayerNorm_1/scale"):
    google.read(tmp_path / "x.npz")


def test_what_is_no_file_of_weights(tmp_path):
  with pytest.raises(FileNotFoundError, match="expected a .npz of weights"):
    weights.read(tmp_path / "none.npz")
  (tmp_path / "x.safetensors").write_text("")
  with pytest.raises(ValueError, match="x.safetensors', expected a .npz"):
    weights.read(tmp_path / "x.safetensors")
  with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
    weights.read(tmp_path / "none")


def test_examples_in_docstrings():
  failed, attempted = doctest.testmod(google)
  assert attempted and not failed

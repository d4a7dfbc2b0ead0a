"""Positions and patch embeddings are resampled to the grid of the model."""

import foreign
import jax
import numpy as np
import pytest
from adapting import DATA, SIZE, adapt, make_target, published
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models, weights
from vit_jax.config import model_config
from vit_jax.models.resample import (
  METHODS,
  resample_patch_kernel,
  resample_posemb,
)
from vit_jax.weights.fitting import KERNEL
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy


def random_weights(model, image, **fields):
  params = foreign.random_params(model, 11, image)
  params = {k: lazy(v) for k, v in params.items()}
  return weights.Weights("random", "google", params, **fields)


@pytest.mark.parametrize(
  "image, grid, method",
  [
    ((48, 48), (6, 6), "zoom"),
    *(((16, 40), (2, 5), method) for method in METHODS),
  ],
)
def test_positions_are_resampled_to_the_grid(image, grid, method):
  found = published("vit_linen_names")
  params, report = adapt(found, image, adapt_options=dict(posemb_filter=method))
  assert report.resized == {POS_EMBEDDING: ((4, 4), grid)}
  np.testing.assert_array_equal(
    params[POS_EMBEDDING],
    resample_posemb(
      np.asarray(found.params[POS_EMBEDDING], np.float32),
      (4, 4),
      grid,
      has_cls_row=True,
      method=method,
    ),
  )


@pytest.mark.parametrize("posemb", ["learn", "learn2d"])
def test_an_unknown_filter(posemb):
  model = model_config(**SIZE, posemb=posemb)
  found = random_weights(model, (32, 32), has_cls_row=posemb == "learn")
  with pytest.raises(ValueError) as e:
    adapt(
      found, (64, 64), posemb=posemb, adapt_options=dict(posemb_filter="zom")
    )
  assert str(e.value) == (
    "posemb_filter: got 'zom', expected one of zoom, bilinear, bicubic, timm,"
    " hf. Did you mean 'zoom'?"
  )


def test_the_same_count_on_another_grid_is_resampled():
  found = published("vit_linen_names")
  params, report = adapt(found, (16, 64))
  assert report.resized == {POS_EMBEDDING: ((4, 4), (2, 8))}
  # Row 1 of 2 is the last of 4.
  np.testing.assert_array_equal(
    params[POS_EMBEDDING][0, 9], np.asarray(found.params[POS_EMBEDDING])[0, 13]
  )


def test_without_class_token():
  params, report = adapt(published("bv_scan"), (48, 48), pool="gap")
  assert params[POS_EMBEDDING].shape == (1, 36, 48)
  assert report.resized == {POS_EMBEDDING: ((4, 4), (6, 6))}


@pytest.mark.parametrize(
  "name, cls_row, note",
  [
    ("bv_token", True, "the position table got a row of zeros for cls."),
    (
      "vit_linen_names",
      False,
      "row 0 of the position table was added to cls.",
    ),
  ],
)
def test_a_row_for_the_class_token_comes_and_goes(name, cls_row, note):
  """No output changes: cls and its row are added before anything else."""
  found = published(name)
  old = {
    k: np.asarray(found.params[k], np.float32) for k in (POS_EMBEDDING, "cls")
  }
  params, report = adapt(found, cls_row=cls_row)
  assert report.notes == (note,) and not report.resized
  if cls_row:
    row = np.zeros((1, 1, 48))
    expected = np.concatenate([row, old[POS_EMBEDDING]], axis=1)
    np.testing.assert_array_equal(params["cls"], old["cls"])
  else:
    expected = old[POS_EMBEDDING][:, 1:]
    np.testing.assert_array_equal(
      params["cls"], old["cls"] + old[POS_EMBEDDING][:, :1]
    )
  np.testing.assert_array_equal(params[POS_EMBEDDING], expected)

  model = models.build(model_config(**SIZE, cls_row=cls_row), 11)
  io = np.load(DATA / f"{name}.io.npz")
  logits, _ = jax.jit(model.apply)(
    {"params": unflatten_dict(params, sep="/")}, io["image"]
  )
  # As test_pretrained.py explains.
  np.testing.assert_allclose(logits, io["logits"], atol=2e-5)

  # And at once with another grid.
  resized, report = adapt(found, (48, 64), cls_row=cls_row)
  assert report.resized == {POS_EMBEDDING: ((4, 4), (6, 8))}
  assert resized[POS_EMBEDDING].shape == (1, 48 + cls_row, 48)
  np.testing.assert_array_equal(resized["cls"], params["cls"])


def test_tables_of_rows_and_of_columns_are_resized_each_alone():
  model = model_config(**SIZE, posemb="learn2d")
  found = random_weights(model, (24, 32))
  assert weights.table_grid(found) == (3, 4)
  for axis, line in (("_y", [0.0, 2, 4]), ("_x", [0.0, 3, 6, 9])):
    table = np.outer(line, np.ones(24))[None].astype(np.float32)
    found.params[POS_EMBEDDING + axis] = lazy(table)
  params, report = adapt(found, (40, 16), posemb="learn2d")
  assert report.resized == {
    POS_EMBEDDING + "_y": ((1, 3), (1, 5)),
    POS_EMBEDDING + "_x": ((1, 4), (1, 2)),
  }
  assert params[POS_EMBEDDING + "_y"][0, :, 7].tolist() == [0, 1, 2, 3, 4]
  assert params[POS_EMBEDDING + "_x"][0, :, 7].tolist() == [0, 9]
  same, report = adapt(found, (24, 32), posemb="learn2d")
  assert not report.resized
  np.testing.assert_array_equal(
    same[POS_EMBEDDING + "_y"], found.params[POS_EMBEDDING + "_y"]
  )


def test_relative_positions_of_another_grid_are_refused():
  model = model_config(**SIZE, posemb="relative")
  found = random_weights(model, (32, 32))
  params, _ = adapt(found, posemb="relative")
  path = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/offsets"
  assert path.format(0) in params
  with pytest.raises(ValueError) as e:
    adapt(found, (16, 16), posemb="relative")
  old, new = (
    flatten_dict(make_target(model, (side, side)), sep="/")[path.format(0)]
    for side in (32, 16)
  )
  assert str(e.value) == (
    "2 errors in the weights of random for this model:\n"
    f"  - {path.format('*')}: got shape {old.shape}, expected {new.shape}."
    " Offsets of another number of tokens cannot be resampled. (2 times)\n"
    "The model is the right one; take other weights."
  )


@pytest.mark.parametrize("patch", [4, 16])
def test_the_patch_embedding_is_resized_if_asked(patch):
  found = published("vit_linen_names")
  # As many tokens as before: no other change.
  image, options = (4 * patch,) * 2, dict(variant=f"B/{patch}")
  with pytest.raises(ValueError) as e:
    adapt(found, image, **options)
  assert str(e.value) == (
    f"1 error in the weights of {found.path} for this model:\n"
    f"  - embedding/kernel: got shape (8, 8, 3, 48), expected ({patch},"
    f" {patch}, 3, 48). To resize it: vit_jax.load(path, patch={patch}), or"
    f" vit-jax convert SRC DST --to=orbax --patch={patch}.\n"
    "The model that fits them: --config.model.variant=B/8"
  )
  params, report = adapt(
    found, image, adapt_options=dict(resize_patch=True), **options
  )
  assert report.resized == {KERNEL: ((8, 8), (patch, patch))}
  np.testing.assert_array_equal(
    params[KERNEL],
    resample_patch_kernel(
      np.asarray(found.params[KERNEL], np.float32), (patch, patch)
    ),
  )
  others = params.keys() - {KERNEL}
  for path in others:
    np.testing.assert_array_equal(params[path], found.params[path])


def test_a_kernel_of_another_width_is_not_resized():
  with pytest.raises(ValueError, match=r"expected \(4, 4, 3, 64\)\.\n"):
    adapt(
      published("vit_linen_names"),
      (16, 16),
      adapt_options=dict(resize_patch=True),
      variant="B/4",
      width=64,
    )

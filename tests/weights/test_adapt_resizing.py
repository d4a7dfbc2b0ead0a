"""Positions and patch embeddings are resampled to the grid of the model."""

import dataclasses

import foreign
import jax
import numpy as np
import pytest
from adapting import adapt, published, random_weights
from flax.traverse_util import unflatten_dict
from weight_files import SIZE

import vit_jax
from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.models.posemb import sincos2d
from vit_jax.models.resample import resample_patch_kernel, resample_posemb
from vit_jax.models.stacking import unstack_blocks
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy

KERNEL = "embedding/kernel"
IN_BLOCKS = [
  f"Transformer/encoderblock_{i}/posembed_input/pos_embedding" for i in (0, 1)
]


@pytest.mark.parametrize(
  "image, grid, method, stated",
  [
    ((48, 48), (6, 6), "zoom", {}),
    ((16, 64), (2, 8), "zoom", {}),  # as many patches, on another grid
    ((16, 40), (2, 5), "hf", {}),  # the filter of the file
    ((16, 40), (2, 5), "dinov2", dict(posemb_filter="dinov2")),
  ],
)
def test_positions_are_resampled_to_the_grid(image, grid, method, stated):
  file = published("vit_linen_names")
  if method == "hf":
    file = dataclasses.replace(file, posemb_filter=method)
  params, report = adapt(file, image, adapt_options=stated)
  assert report.resized == {POS_EMBEDDING: ((4, 4), grid)}
  table = np.asarray(file.params[POS_EMBEDDING], np.float32)
  np.testing.assert_array_equal(
    params[POS_EMBEDDING], resample_posemb(table, (4, 4), grid, 1, method)
  )


def test_an_unknown_grid_is_asked_for():
  table = lazy(np.zeros((1, 1 + 15, 48), "f"))  # 15 patches
  file = published()
  file = dataclasses.replace(file, params=file.params | {POS_EMBEDDING: table})
  with pytest.raises(ValueError) as e:
    adapt(file, (24, 40))
  text = str(e.value).split("\n")[1]
  assert f"{POS_EMBEDDING}: got 15 patches, expected a square number" in text
  assert "cls_row" in text
  _, report = adapt(dataclasses.replace(file, grid=(3, 5)), (24, 40))
  assert not report.resized
  with pytest.raises(ValueError, match="got 16 rows, expected 21: 4 x 5"):
    adapt(dataclasses.replace(file, grid=(4, 5)), (24, 40))


@pytest.mark.parametrize(
  "name, cls_row", [("bv_token", True), ("vit_linen_names", False)]
)
def test_a_row_for_the_class_token_comes_and_goes(name, cls_row):
  """No output changes: cls and its row are added before anything else."""
  file = published(name)
  cls, table = (
    np.asarray(file.params[k], np.float32) for k in ("cls", POS_EMBEDDING)
  )
  params, report = adapt(file, cls_row=cls_row)
  assert len(report.notes) == 1 and not report.resized
  if cls_row:
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  else:
    cls, table = cls + table[:, :1], table[:, 1:]
  np.testing.assert_array_equal(params["cls"], cls)
  np.testing.assert_array_equal(params[POS_EMBEDDING], table)

  # And at once with another grid.
  resized, report = adapt(file, (48, 64), cls_row=cls_row)
  assert report.resized == {POS_EMBEDDING: ((4, 4), (6, 8))}
  assert resized[POS_EMBEDDING].shape == (1, 48 + cls_row, 48)
  np.testing.assert_array_equal(resized["cls"], params["cls"])


def test_a_learned_table_begins_with_fixed_sines():
  """Those of the model's grid: nothing is resized."""
  options = {"posemb": "sincos2d"}
  model = model_config(**SIZE | options)
  file = random_weights(model, (32, 32), options=options, grid=(4, 4))
  params, report = adapt(file, (48, 32))
  table = params[POS_EMBEDDING][0]
  assert not table[0].any()  # the class token's
  np.testing.assert_array_equal(table[1:], sincos2d(6, 4, 48))
  assert not report.resized and not report.reinitialised
  assert any("fixed sines" in note for note in report.notes)
  with pytest.raises(ValueError, match="pos_embedding: missing"):
    adapt(dataclasses.replace(file, options={}))


@pytest.mark.parametrize("at", ["stem", "blocks"])
def test_tables_of_rows_and_of_columns_are_resized_each_alone(at):
  options = dict(posemb="learn2d", posemb_at=at)
  model = model_config(**SIZE, **options)
  file = random_weights(model, (24, 32))
  assert weights.table_grid(file, model) == (3, 4)
  paths = IN_BLOCKS if at == "blocks" else [POS_EMBEDDING]
  for path in paths:
    for axis, line in (("_y", [0.0, 2, 4]), ("_x", [0.0, 3, 6, 9])):
      table = np.outer(line, np.ones(24))[None].astype(np.float32)
      file.params[path + axis] = lazy(table)
  params, report = adapt(file, (40, 16), **options)
  for path in paths:
    assert report.resized[path + "_y"] == ((1, 3), (1, 5))
    assert report.resized[path + "_x"] == ((1, 4), (1, 2))
    assert params[path + "_y"][0, :, 7].tolist() == [0, 1, 2, 3, 4]
    assert params[path + "_x"][0, :, 7].tolist() == [0, 9]
  _, report = adapt(file, (24, 32), **options)
  assert not report.resized


@pytest.mark.parametrize("stated", [True, False])
def test_biases_of_offsets_are_resized(stated):
  """An affine function of the offset stays one; those of cls stay."""
  parts = dict(name="modern", posemb="relative_bias", qkv_bias="no_key")
  model, grid = model_config(**SIZE, **parts), (3, 3)
  file = random_weights(model, (24, 24), grid=grid if stated else None)
  y, x = np.mgrid[-2:3, -2:3].reshape(2, -1, 1)
  ends = np.full((3, 4), [[5.0], [6.0], [7.0]])
  table = np.concatenate([np.tile(0.5 * y - 0.25 * x, 4), ends])
  paths = [p for p in file.params if p.endswith("relative_bias")]
  file.params.update({p: lazy(table.astype("f")) for p in paths})
  params, report = adapt(file, (40, 16), **parts)
  assert report.resized == dict.fromkeys(paths, ((3, 3), (5, 2)))
  y, x = np.mgrid[-2:2:9j, -2:2:3j].reshape(2, -1, 1)  # zoom keeps corners
  expected = np.concatenate([np.tile(0.5 * y - 0.25 * x, 4), ends])
  for path in paths:
    np.testing.assert_allclose(params[path], expected, atol=1e-6)
  assert weights.trained_at(file) == (24, 24)
  file = random_weights(model_config(**SIZE, **parts), (24, 16))
  adapt(file, (24, 16), **parts)  # as many rows as the images need
  with pytest.raises(ValueError, match="18 rows of offsets; pass grid="):
    adapt(file, (40, 16), **parts)


@pytest.mark.parametrize("has_rows, wants_rows", [(1, 1), (1, 0), (0, 1)])
def test_rows_of_both_class_tokens(has_rows, wants_rows):
  """They stay, become part of the tokens, or are rows of zeros."""
  parts = dict(name="modern", distilled=True, registers=2)
  model = model_config(**SIZE, **parts, cls_row=bool(has_rows))
  file = random_weights(
    model, (24, 32), grid=(3, 4), has_cls_row=bool(has_rows)
  )
  params, report = adapt(file, (40, 16), **parts, cls_row=bool(wants_rows))
  assert report.resized == {POS_EMBEDDING: ((3, 4), (5, 2))}
  table, tokens = np.asarray(file.params[POS_EMBEDDING]), {}
  resized = resample_posemb(table, (3, 4), (5, 2), 2 * has_rows)
  for i, token in enumerate(("cls", "dist")):
    tokens[token] = np.asarray(file.params[token])
    if has_rows and not wants_rows:
      tokens[token] = tokens[token] + table[:, i : i + 1]
    np.testing.assert_array_equal(params[token], tokens[token])
  np.testing.assert_array_equal(
    params[POS_EMBEDDING][:, -10:], resized[:, -10:]
  )
  rows = params[POS_EMBEDDING][:, :-10]
  assert rows.shape[1] == 2 * wants_rows
  assert not wants_rows or np.array_equal(rows, table[:, :2] * has_rows)
  np.testing.assert_array_equal(params["registers"], file.params["registers"])


def test_a_class_row_of_every_block_cannot_become_part_of_cls():
  model = model_config(**SIZE, posemb_at="blocks")
  file = random_weights(model, (32, 32), grid=(4, 4), has_cls_row=True)
  with pytest.raises(ValueError, match=r"encoderblock_\*.*cls_row=True"):
    adapt(file, posemb_at="blocks", cls_row=False)


@pytest.mark.parametrize(
  "at, scan, cls_row",
  [
    pytest.param("blocks", True, True, marks=pytest.mark.slow),
    pytest.param("shared", False, False, marks=pytest.mark.nightly),
  ],
)
def test_a_checkpoint_of_any_place_loads_again(tmp_path, at, scan, cls_row):
  model = model_config(**SIZE, posemb_at=at, scan=scan, cls_row=cls_row)
  params = foreign.random_params(model, 11, (24, 32))
  params = unflatten_dict(params, sep="/")
  metadata = {
    "model": to_dict(model),
    "image_size": [24, 32],
    "grid": [3, 4],
    "has_cls_row": model.has_cls_row,
    "loss": "softmax",
  }
  path = str(tmp_path / "run")
  checkpointer.write_params(path, params, metadata)
  assert weights.read(path).has_cls_row == cls_row
  vit = vit_jax.load(path, verbose=False)
  assert vit.config.unstacked() == model.unstacked()
  got = unstack_blocks(vit.params, vit.config)
  jax.tree.map(
    np.testing.assert_array_equal, got, unstack_blocks(params, model)
  )
  wider = vit_jax.load(path, image_size=(40, 16), verbose=False)
  assert len(wider.report.resized) == (2 if at == "blocks" else 1)


def test_the_patch_embedding_is_resized_if_asked():
  file = published("vit_linen_names")
  # As many tokens as before: no other change.
  image, options = (16, 16), dict(variant="B/4")
  with pytest.raises(ValueError, match="(?s)embedding/kernel.*patch=4"):
    adapt(file, image, **options)
  resize = dict(resize_patch=True)
  params, report = adapt(file, image, adapt_options=resize, **options)
  assert report.resized == {KERNEL: ((8, 8), (4, 4))}
  kernel = np.asarray(file.params[KERNEL], np.float32)
  np.testing.assert_array_equal(
    params.pop(KERNEL), resample_patch_kernel(kernel, (4, 4))
  )
  for path, array in params.items():
    np.testing.assert_array_equal(array, file.params[path])

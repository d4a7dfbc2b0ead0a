"""Weights whose positions are added in every block: resized, told, refused."""

import dataclasses
import pathlib

import foreign
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax import models, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.exporting import convert
from vit_jax.models.resample import resample_posemb
from vit_jax.weights import hf, timm
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy

SIZE = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
TABLES = [
  f"Transformer/encoderblock_{i}/posembed_input/pos_embedding" for i in (0, 1)
]


def adapt(model, old, new, change=None, **fields):
  """Random weights at one size of image, fitted to the model at another."""
  params = foreign.random_params(model, 11, old)
  found = weights.Weights(
    "random", "ours", {k: lazy(v) for k, v in params.items()}, **fields
  )
  model = dataclasses.replace(model, **change or {})
  module = models.build(model, 11)
  images = jax.ShapeDtypeStruct((1, *new, 3), "float32")
  target = jax.eval_shape(module.init, jax.random.key(0), images)["params"]
  fitted, report = weights.adapt(found, target, model, new)
  return params, flatten_dict(fitted, sep="/"), report


def test_the_table_of_every_block_is_resized():
  model = model_config(**SIZE, posemb_at="blocks")
  params, fitted, report = adapt(
    model, (24, 32), (40, 16), grid=(3, 4), has_cls_row=True
  )
  assert report.resized == dict.fromkeys(TABLES, ((3, 4), (5, 2)))
  for path in TABLES:
    expected = resample_posemb(params[path], (3, 4), (5, 2), True)
    np.testing.assert_array_equal(fitted[path], expected)


def test_halves_of_every_block_are_resized_and_state_their_grid():
  model = model_config(**SIZE, posemb="learn2d", posemb_at="blocks")
  params, fitted, report = adapt(model, (24, 32), (24, 16))
  paths = [path + "_x" for path in TABLES]
  assert report.resized == dict.fromkeys(paths, ((1, 4), (1, 2)))
  # Of 4 columns, the first and the last.
  np.testing.assert_allclose(
    fitted[paths[1]], params[paths[1]][:, [0, -1]], rtol=1e-7
  )
  found = weights.Weights("", "", {k: lazy(v) for k, v in params.items()})
  assert weights.table_grid(found) == (3, 4)


@pytest.mark.parametrize(
  "at, path", [("shared", POS_EMBEDDING), ("blocks", TABLES[0])]
)
def test_a_class_row_of_every_block_cannot_become_part_of_cls(at, path):
  model = model_config(**SIZE, posemb_at=at)
  options = dict(grid=(4, 4), has_cls_row=True)
  with pytest.raises(ValueError) as e:
    adapt(model, (32, 32), (32, 32), {"cls_row": False}, **options)
  told = path.replace("encoderblock_0", "encoderblock_*")
  told += ": got a row for the class token, which is added in every block"
  assert told in str(e.value)
  assert "expected config.model.cls_row=True." in str(e.value)
  # A row of zeros changes nothing.
  less = dataclasses.replace(model, cls_row=False)
  _, fitted, _ = adapt(less, (32, 32), (32, 32), {"cls_row": True}, grid=(4, 4))
  assert fitted[path].shape == (1, 17, 48) and not fitted[path][0, 0].any()


@pytest.mark.parametrize("posemb", ["learn", "learn2d"])
def test_their_model_is_known_by_the_names(posemb):
  model = model_config(**SIZE, posemb=posemb, posemb_at="blocks")
  params = foreign.random_params(model, 11, (24, 32))
  assert weights.identify(params, {}) == model


@pytest.mark.parametrize(
  "cls_row", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
  "at", ["blocks", "stem", pytest.param("shared", marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_any_place_loads_again(tmp_path, at, scan, cls_row):
  model = model_config(**SIZE, posemb_at=at, scan=scan, cls_row=cls_row)
  module = models.build(model, 11)
  images = jax.random.uniform(jax.random.key(1), (2, 24, 32, 3)) * 2 - 1
  params = module.init(jax.random.key(0), images)["params"]
  metadata = {
    "model": to_dict(model),
    "image_size": [24, 32],
    "grid": [3, 4],
    "has_cls_row": model.has_cls_row,
    "loss": "softmax",
  }
  checkpointer.write_params(str(tmp_path / "run"), params, metadata)
  found = weights.read(str(tmp_path / "run"))
  assert found.has_cls_row == cls_row
  vit = vit_jax.load(str(tmp_path / "run"), verbose=False)
  np.testing.assert_allclose(  # rounding: blocks in a scan are unrolled
    vit(images)[0], module.apply({"params": params}, images)[0], atol=1e-5
  )
  wider = vit_jax.load(
    str(tmp_path / "run"), image_size=(40, 16), verbose=False
  )
  assert len(wider.report.resized) == (2 if at == "blocks" else 1)


def test_other_places_are_noted():
  model = model_config(**SIZE, posemb_at="shared")
  options = dict(grid=(4, 4), has_cls_row=True, options={"posemb_at": "shared"})
  _, _, report = adapt(
    model, (32, 32), (32, 32), {"posemb_at": "stem"}, **options
  )
  assert report.notes == (
    "these weights were trained with posemb_at=shared, the model has stem;"
    " config.model.posemb_at=shared keeps it.",
  )


def test_formats_of_others_refuse_them(tmp_path):
  model = model_config(**SIZE, posemb_at="shared")
  params = foreign.random_params(model, 11, (32, 32))
  message = "config.model.posemb_at: got 'shared', expected 'stem':"
  with pytest.raises(ValueError, match=message):
    timm.write(params, model)
  assert timm.create_call(model, 11, (32, 32)) == (None, {})
  with pytest.raises(ValueError, match=message):
    hf.write(params, model, num_classes=11, image_size=(32, 32))
  vit = vit_jax.load(
    pathlib.Path(__file__).parents[1] / "data" / "vit_token.weights.npz"
  )
  moved = dataclasses.replace(vit.config, posemb_at="shared")
  with pytest.raises(ValueError, match=message):
    convert.convert(
      dataclasses.replace(vit, config=moved), str(tmp_path / "x.npz"), "npz"
    )
  assert not (tmp_path / "x.npz").exists()

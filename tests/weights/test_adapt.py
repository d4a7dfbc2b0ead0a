"""Fitting weights to a model: what is kept, resized, dropped, refused."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from vit_jax import checkpoint, weights
from vit_jax.models.resample import resample_posemb
from vit_jax.models.stacking import stack_blocks
from vit_jax.models.vit import ViT
from vit_jax.weights.google import POS_EMBEDDING

DATA = pathlib.Path(__file__).parents[1] / "data"
BLOCK = "Transformer/encoderblock_1/"


def make_target(image=(32, 32), **options):
  size = dict(
    num_classes=11, patch=8, width=48, depth=2, mlp_dim=96, num_heads=4
  )
  model = ViT(**size | options)
  images = jax.ShapeDtypeStruct((1, *image, 3), "float32")
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


def published(name="vit_token_prelogits"):
  """Weights with a class token on a grid of 4 x 4, 2 blocks, 11 classes."""
  return weights.read(DATA / f"{name}.weights.npz")


def changed(params):
  found = published()
  return dataclasses.replace(found, params=found.params | params)


def adapt(found, target, grid=(4, 4), has_cls_row=True):
  params, report = weights.adapt(
    found, target, grid=grid, has_cls_row=has_cls_row
  )
  return flatten_dict(params, sep="/"), report


HEAD = ("head/bias", "head/kernel")
TANH = ("pre_logits/bias", "pre_logits/kernel")


@pytest.mark.parametrize(
  "source, options, reinitialised, ignored",
  [
    ("vit_token_prelogits", dict(pre_logits=True), (), ()),
    ("vit_linen_names", dict(), (), ()),
    # As the paper fine-tunes: both layers removed, a new head attached.
    ("vit_token_prelogits", dict(num_classes=3), HEAD, TANH),
    # The head was trained on what tanh gave, so it goes with it.
    ("vit_token_prelogits", dict(), HEAD, TANH),
    ("vit_linen_names", dict(pre_logits=True), HEAD + TANH, ()),
    (
      "vit_token_prelogits",
      dict(num_classes=3, pre_logits=True),
      HEAD + TANH,
      (),
    ),
  ],
)
def test_the_head_is_taken_as_a_whole_or_not(
  source, options, reinitialised, ignored
):
  found, target = published(source), make_target(**options)
  params, report = adapt(found, target)
  assert report.reinitialised == reinitialised
  assert report.ignored == ignored
  expected = flatten_dict(target, sep="/")
  assert params.keys() == expected.keys()
  for path, array in params.items():
    if path in reinitialised:
      assert array is None
      continue
    assert array.dtype == np.float32 and array.shape == expected[path].shape
    np.testing.assert_array_equal(array, found.params[path])
  assert report.loaded == {
    k: v.shape for k, v in expected.items() if k not in reinitialised
  }


def test_the_caller_keeps_its_own_where_there_is_none():
  target = make_target(num_classes=3)
  fresh = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), target)
  loaded, _ = weights.adapt(published(), fresh, grid=(4, 4), has_cls_row=True)
  params = jax.tree.map(
    lambda old, new: old if new is None else new, fresh, loaded
  )
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  assert not params["head"]["kernel"].any() and params["cls"].any()


@pytest.mark.parametrize(
  "image, grid", [((48, 48), (6, 6)), ((16, 40), (2, 5))]
)
def test_positions_are_resampled_to_the_grid(image, grid):
  found = published("vit_linen_names")
  params, report = adapt(found, make_target(image), grid)
  assert report.resized == {POS_EMBEDDING: ((4, 4), grid)}
  np.testing.assert_array_equal(
    params[POS_EMBEDDING],
    resample_posemb(
      found.params[POS_EMBEDDING].astype("f"), (4, 4), grid, has_cls_row=True
    ),
  )


def test_the_same_count_on_another_grid_is_resampled():
  params, report = adapt(
    published("vit_linen_names"), make_target((16, 64)), (2, 8)
  )
  assert report.resized == {POS_EMBEDDING: ((4, 4), (2, 8))}
  # Row 1 of 2 is the last of 4.
  np.testing.assert_array_equal(
    params[POS_EMBEDDING][0, 9],
    published("vit_linen_names").params[POS_EMBEDDING][0, 13],
  )


def test_without_class_token():
  target = make_target((48, 48), pool="gap")
  params, report = adapt(published("bv_scan"), target, (6, 6), False)
  assert params[POS_EMBEDDING].shape == (1, 36, 48)
  assert report.resized == {POS_EMBEDDING: ((4, 4), (6, 6))}


def test_loops_become_scans_and_back():
  found = published("vit_linen_names")
  loop, _ = weights.adapt(found, make_target(), grid=(4, 4), has_cls_row=True)
  scan, report = weights.adapt(
    found, make_target(scan=True), grid=(4, 4), has_cls_row=True
  )
  jax.tree.map(np.testing.assert_array_equal, scan, stack_blocks(loop))
  assert BLOCK + "LayerNorm_0/scale" in report.loaded
  stacked = dataclasses.replace(found, params=flatten_dict(scan, sep="/"))
  for options in (dict(), dict(scan=True)):
    got, _ = adapt(stacked, make_target(**options))
    expected = flatten_dict(scan if options else loop, sep="/")
    assert got.keys() == expected.keys()
    for path in got:
      np.testing.assert_array_equal(got[path], expected[path])


def test_our_checkpoints_state_their_grid(monkeypatch, tmp_path):
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda a: rng.normal(size=a.shape).astype("f"), make_target((16, 32))
  )
  metadata = {"grid": [2, 4], "has_cls_row": True, "image_size": [16, 32]}
  monkeypatch.setattr(
    checkpoint, "load_params", lambda path: (params, dict(metadata))
  )
  found = weights.read(tmp_path)
  assert found.metadata == metadata | {
    "format": "checkpoint",
    "path": str(tmp_path),
    "grid": (2, 4),
    "pre_logits": False,
  }
  _, report = adapt(found, make_target((16, 32)), (2, 4))
  assert not report.resized
  _, report = adapt(found, make_target(), (4, 4))
  assert report.resized == {POS_EMBEDDING: ((2, 4), (4, 4))}


def test_an_unknown_grid_is_asked_for():
  table = np.zeros((1, 1 + 15, 48), "f")  # 15 patches; 16 is no excuse
  found = changed({POS_EMBEDDING: table})
  target = make_target((24, 40))
  with pytest.raises(
    ValueError, match=r"got 15 patches, expected a square .* grid=\(rows"
  ):
    adapt(found, target, (3, 5))
  stated = dataclasses.replace(
    found, metadata=found.metadata | {"grid": (3, 5)}
  )
  _, report = adapt(stated, target, (3, 5))
  assert not report.resized
  wrong = dataclasses.replace(found, metadata=found.metadata | {"grid": (4, 5)})
  with pytest.raises(ValueError, match="got 16 rows, expected 21: 4 x 5"):
    adapt(wrong, target, (3, 5))


def test_all_faults_are_told_at_once():
  kernel = BLOCK + "MlpBlock_0/Dense_0/kernel"
  norm = "Transformer/encoder_norm/scale"
  bad = np.ones(48, "f")
  bad[3:5] = np.nan, np.inf
  found = changed(
    {kernel: np.zeros((48, 95), "f"), norm: bad, "conv_root/kernel": bad}
  )
  del found.params["cls"]
  with pytest.raises(ValueError) as e:
    adapt(found, make_target(num_classes=3))
  assert str(e.value) == (
    "4 faults in the weights of"
    f" {DATA}/vit_token_prelogits.weights.npz for this model:\n"
    f"  - {norm}: got 2 values that are NaN or infinite, expected none.\n"
    f"  - {kernel}: got shape (48, 95), expected (48, 96).\n"
    "  - cls: missing, expected shape (1, 1, 48).\n"
    "  - conv_root/kernel: got shape (48,), expected no such parameter.\n"
    "Set config.model (variant, pool, posemb) as these weights were trained,"
    " or take others."
  )


@pytest.mark.parametrize(
  "source, options, has_cls_row, message",
  [
    (
      "vit_linen_names",
      dict(pool="gap"),
      False,
      r"2 faults .*pos_embedding: got shape \(1, 17, 48\), expected \(1, 16,"
      r" 48\).*- cls: got shape \(1, 1, 48\), expected no such",
    ),
    ("bv_scan", dict(), True, r"cls: missing, expected shape \(1, 1, 48\)"),
    (
      "vit_linen_names",
      dict(posemb="none"),
      False,
      "^1 fault in .*pos_embedding: got shape .* expected no such parameter",
    ),
    (
      "vit_linen_names",
      dict(depth=1),
      True,
      "16 faults .*encoderblock_1/LayerNorm_0/bias: got shape .* no such",
    ),
    (
      "vit_linen_names",
      dict(depth=3, scan=True),
      True,
      "16 faults .*encoderblock_2/LayerNorm_0/bias: missing",
    ),
    (
      "vit_linen_names",
      dict(width=64),
      True,
      r"got shape \(1, 17, 48\), expected \(1, 17, 64\)",
    ),
  ],
)
def test_other_models(source, options, has_cls_row, message):
  with pytest.raises(ValueError, match=f"(?s){message}"):
    adapt(published(source), make_target(**options), has_cls_row=has_cls_row)


def test_weights_of_something_else_are_all_faults():
  found = weights.Weights(
    {"conv/kernel": np.zeros(3)},
    {"grid": None, "has_cls_row": False, "path": "x"},
  )
  with pytest.raises(ValueError, match="conv/kernel: got .*no such parameter"):
    adapt(found, make_target())


def test_report():
  found = dataclasses.replace(
    published(), metadata=published().metadata | {"path": "B_16.npz"}
  )
  _, report = adapt(found, make_target((48, 48), num_classes=3), (6, 6))
  # 9,264 of the stem, 48 of cls, 37 * 48 positions, 2 * 18,960 of the blocks,
  # 96 of the last norm.
  assert weights.format_report(report) == (
    "weights         B_16.npz\n"
    "loaded          38 arrays, 49,104 parameters\n"
    f"resized         {POS_EMBEDDING}: 4x4 -> 6x6\n"
    "re-initialised  head/bias, head/kernel\n"
    "ignored         pre_logits/bias, pre_logits/kernel"
  )


@pytest.mark.parametrize(
  "old, new, is_kept",
  [
    ("abcdefghijk", "abcdefghijk", True),
    ("abcdefghijk", "bacdefghijk", False),  # as many, but others
    (None, "abcdefghijk", True),
    ("abcdefghijk", None, True),
  ],
)
def test_the_head_of_other_classes_is_dropped(old, new, is_kept):
  found = published()
  names = list(old) if old else None
  found = weights.Weights(found.params, found.metadata | {"class_names": names})
  params, report = weights.adapt(
    found,
    make_target(pre_logits=True),
    grid=(4, 4),
    has_cls_row=True,
    class_names=tuple(new) if new else None,
  )
  assert (params["head"]["kernel"] is not None) == is_kept
  assert bool(report.reinitialised) != is_kept

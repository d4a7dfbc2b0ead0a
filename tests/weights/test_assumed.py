"""What no array states: assumed in one line, stated by the user, or refused."""

import dataclasses

import numpy as np
import pytest
import tiny
from series_parts import (
  CLIP,
  DEIT3,
  DINOV2,
  DINOV3,
  DISTILLED,
  EVA02,
  POOLED,
  REGISTERS,
)  # fmt: skip
from weight_files import (
  MODEL,
  SIZE,
  TOWER,
  assert_same,
  hf_folder,
  message,
  nested,
  openclip_folder,
  orbax,
  our_params,
  save,
  timm_file,
)

import vit_jax
from vit_jax import run_checks, run_summary, weights
from vit_jax.config import ConfigError, model_config
from vit_jax.models.resample import resample_posemb
from vit_jax.weights import normalisation
from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files import timm_names

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BYTES = (np.zeros(3), np.full(3, 1 / 255))  # images from 0 to 255
HEADS = {"num_heads": 4}
MODERN = SIZE | dict(name="modern")


def read(path, **options):
  """Reads a bare file of timm's."""
  stated = {k: options.pop(k) for k in ("mean", "std", "grid") if k in options}
  return weights.read(path, options=HEADS | options, **stated)


# Pixels.


def embed(params, pixels):
  """Returns the tokens of patches of 8 x 8, with their positions, [n, d]."""
  n, _, width, _ = pixels.shape
  assert n == 1 and width == 32
  patches = pixels.reshape(4, 8, 4, 8, 3).transpose(0, 2, 1, 3, 4)
  kernel = np.asarray(params["embedding/kernel"], np.float64)
  tokens = np.einsum("yxhwi,hwio->yxo", patches, kernel).reshape(16, -1)
  if "embedding/bias" in params:
    tokens = tokens + np.asarray(params["embedding/bias"], np.float64)
  return tokens + np.asarray(params[POS_EMBEDDING], np.float64)[0, -16:]


@pytest.mark.parametrize(
  "mean, std, expected, model",
  [
    (*IMAGENET, IMAGENET, MODEL),
    ("0.485,0.456,0.406/0.229,0.224,0.225", None, IMAGENET, MODEL),
    (0, 1 / 255, BYTES, MODEL),
    ("imagenet", None, IMAGENET, TOWER),
  ],
)
def test_images_enter_as_in_training(tmp_path, mean, std, expected, model):
  """The normalisation moves into the patches, without a bias into positions."""
  if model is TOWER:
    path = openclip_folder(tmp_path, preprocess_cfg={})
    own = our_params((32, 32), 0, TOWER)
  else:
    path, own = timm_file(tmp_path), our_params()
  pixels = np.random.default_rng(0).uniform(0, 1, (1, 32, 32, 3))
  result = read(path, mean=mean, std=std)
  got = embed(result.params, 2 * pixels - 1)
  want = embed(own, (pixels - expected[0]) / expected[1])
  # Sums of 192 products of about 1 / sqrt(192) times a pixel, rounded at 6e-8.
  scale = np.abs(want).max()
  np.testing.assert_allclose(got / scale, want / scale, atol=1e-6)
  assert normalisation.UNSTATED not in result.notes
  # The class token has no pixels.
  table = np.asarray(result.params[POS_EMBEDDING])
  np.testing.assert_array_equal(table[:, 0], own[POS_EMBEDDING][:, 0])


def test_every_file_that_states_no_pixels_says_so(tmp_path):
  folder = hf_folder(tmp_path / "hf", about={})
  tree = orbax(tmp_path / "tree", nested(our_params()))
  bare = timm_file(tmp_path / "bare")
  for path in (folder, tree, bare):
    assert normalisation.UNSTATED in read(path).notes
    stated = read(path, mean="imagenet")
    assert normalisation.UNSTATED not in stated.notes
    assert "mean [0.485, 0.456, 0.406]" in " ".join(stated.notes)
  assert_same(read(bare), our_params())  # it gets what it was trained on
  unknown = {"image_processor_type": "PvtImageProcessor", "size": 32}
  hf_folder(tmp_path / "hf", about=unknown)
  assert normalisation.UNSTATED in read(folder).notes
  hf_folder(tmp_path / "hf")
  assert normalisation.UNSTATED not in read(folder).notes
  # Google's files have images in [-1, 1].
  assert not weights.read(save(tmp_path / "x.npz")).notes
  # I-JEPA's have ImageNet's mean, also where no file states it.
  model = model_config(**SIZE, pool="gap")
  folder = hf_folder(tmp_path / "i", about={}, model=model, num_classes=0)
  assumed, folded = weights.read(folder).notes
  assert assumed == normalisation.ASSUMED.format("imagenet")
  assert "mean [0.485, 0.456, 0.406]" in folded


# Series that arrays name.


CROP = "decode(dct='accurate')|resize_small_torch({})|central_crop_torch(32)"
WHOLE = "decode(dct='accurate')|resize_torch(256, 'bilinear')"
WITHOUT_HEAD = dict(registers=1, cls_row=False, gelu="erf")
NAMELESS = DINOV2 | dict(registers=2, class_token=False, pool="gap")


@pytest.mark.parametrize(
  "options, name, pixels, ops",
  [
    (DISTILLED, "DeiT", "imagenet", CROP.format(36)),
    # Its second head is not in every file.
    (WITHOUT_HEAD, "DeiT", "imagenet", CROP.format(36)),
    (DEIT3, "DeiT III", "imagenet", CROP.format(32)),
    (DINOV2, "DINOv2", "imagenet", CROP.format(36)),
    (DINOV3, "DINOv3", "imagenet", WHOLE),
    # One register: images in [0, 1], which DINOv2's four do not have.
    (REGISTERS | dict(registers=1), "TIPS v2", None, None),
    (CLIP, "CLIP", "clip", CROP.format(32)),
    (POOLED | dict(gelu="erf"), "MAE", "imagenet", CROP.format(36)),
    (EVA02, "EVA-02", "clip", CROP.format(32)),
    # Registers without a class token name no series.
    (NAMELESS, None, None, None),
  ],
)
def test_the_images_of_a_series(tmp_path, options, name, pixels, ops):
  model = model_config(**MODERN | options)
  path = timm_file(tmp_path, model=model, num_classes=3)
  result = read(path)
  if name is None:
    assert result.pixels is None and normalisation.UNSTATED in result.notes
    return
  first, *_ = result.notes
  assert f"{name}'s are assumed" in first
  if pixels is None:
    assert result.pixels == ((0.0,) * 3, (1.0,) * 3)
    return
  assert (result.pixels, result.ops) == (normalisation.NAMED[pixels], ops)
  assert "--config.init_mean" in first and ops in first
  stated = read(path, mean="half")
  assert f"{name}'s are assumed, {ops}" in stated.notes[0]
  assert (stated.pixels, stated.ops) == (normalisation.HALF, ops)
  # What the reader states of the model is what it was made with.
  got = weights.identify(result.params, result.options)
  assert dataclasses.replace(got, layer_scale=model.layer_scale) == model


def test_a_series_whose_grid_only_the_images_state(tmp_path):
  model = model_config(**SIZE | DEIT3)
  params = our_params((16, 48), 3, model)
  path = timm_file(tmp_path, model=model, params=params)
  result = read(path, cls_row=False)
  assert result.pixels == normalisation.NAMED["imagenet"]
  assert result.ops is None and "DeiT III's are assumed" in result.notes[0]
  options = dict(cls_row=False, verbose=False, **HEADS)
  vit = vit_jax.load(path, image_size=(16, 48), **options)
  assert (vit.image_size, vit.report.resized) == ((16, 48), {})


def test_mae_s_table_begins_with_zeros(tmp_path):
  params = our_params(num_classes=3)
  assert read(timm_file(tmp_path, params=params)).pixels is None
  table = params[POS_EMBEDDING].copy()
  table[:, 0] = 0
  path = timm_file(tmp_path, params=params | {POS_EMBEDDING: table})
  assert read(path).pixels == normalisation.NAMED["imagenet"]


def test_dinov2_resizes_positions_to_its_processor_s_images(tmp_path):
  """Published tables are of 37 x 37 patches, images of 16 x 16."""
  model = model_config(**SIZE | DINOV2 | dict(mlp_dim=192))
  about = {"image_processor_type": "BitImageProcessor", "crop_size": 16}
  about["size"] = {"shortest_edge": 18}
  folder = hf_folder(
    tmp_path, (32, 32), about=about, model=model, num_classes=0
  )
  vit = vit_jax.load(folder, mean="half", verbose=False)
  assert vit.image_size == (16, 16)
  assert vit.ops.endswith("resize_small_torch(18)|central_crop(16)")
  own = our_params((32, 32), 0, model)[POS_EMBEDDING]
  table = resample_posemb(own, (4, 4), (2, 2), 1, "dinov2")
  got = vit.params["Transformer"]["posembed_input"]["pos_embedding"]
  np.testing.assert_array_equal(got, table)


# The model.


def test_a_bare_file_says_what_its_model_is_taken_for(tmp_path):
  path = timm_file(tmp_path)
  _, note, of_head = vit_jax.load(path, verbose=False, **HEADS).report.notes
  assert "loss" in of_head
  for part in ("class token as output", "gelu='erf'", "square grid"):
    assert part in note
  options = dict(gelu="tanh", grid=(4, 4), verbose=False, **HEADS)
  _, note, _ = vit_jax.load(path, **options).report.notes
  assert "class token as output" in note and "gelu='erf'" not in note
  timm_file(tmp_path, {"architecture": "vit"})
  vit = vit_jax.load(path, verbose=False, **HEADS)
  assert len(vit.report.notes) == 1  # of the pixels
  path = timm_file(tmp_path / "gap", model=model_config(**SIZE, pool="gap"))
  notes = vit_jax.load(path, verbose=False, **HEADS).report.notes
  assert "the mean of the tokens" in notes[1]


@pytest.mark.parametrize(
  "trained, image, options, resized, read_as",
  [
    # 16 patches are 8 x 2 as well as 4 x 4.
    ((32, 32), (64, 16), {}, False, "8 x 2"),
    ((32, 32), (64, 16), {"grid": (4, 4)}, True, None),
    ((32, 32), (64, 32), {}, True, None),
    # No square has 12 patches, so the images decide.
    ((16, 48), (16, 48), {}, False, "2 x 6"),
  ],
)
def test_how_a_table_of_positions_is_read(
  tmp_path, trained, image, options, resized, read_as
):
  model = model_config(**SIZE, pool="gap")
  params = our_params(trained, 11, model)
  path = timm_file(tmp_path, model=model, params=params)
  options = {"verbose": False, **options, **HEADS}
  vit = vit_jax.load(path, image_size=image, **options)
  assert bool(vit.report.resized) == resized
  notes = [note for note in vit.report.notes if "positions" in note]
  assert len(notes) == (read_as is not None)
  assert all(read_as in note for note in notes)
  if trained == (16, 48):
    assert "got 12 patches" in message(path, **options)


def test_published_grids_are_square(tmp_path):
  """The images do not change how a published file is read, but it is said."""
  path = save(tmp_path / "x.npz")
  vit = vit_jax.load(path, image_size=(64, 16), verbose=False)
  assert list(vit.report.resized.values()) == [((4, 4), (8, 2))]
  assert "4 x 4" in vit.report.notes[1]  # the first is on the head


@pytest.mark.parametrize("grid", [None, (2, 8)])
def test_a_class_token_without_a_row(tmp_path, grid):
  """FlexiViT's table is square without a row for its class token."""
  table = our_params()[POS_EMBEDDING][:, :16]
  path = timm_file(tmp_path, params=our_params() | {POS_EMBEDDING: table})
  vit = vit_jax.load(path, grid=grid, verbose=False, **HEADS)
  assert vit.config.cls_row is False
  assert vit.image_size[1] == (64 if grid else 32)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_positions_that_a_file_of_timm_s_lacks(tmp_path, pool):
  model = model_config(**SIZE, pool=pool, posemb="none")
  path = timm_file(tmp_path, model=model)
  assert "position table" in message(path, **HEADS)
  result = read(path, posemb="none")
  assert weights.identify(result.params, result.options).posemb == "none"
  timm_file(
    tmp_path, {"model_args": HEADS | {"pos_embed": "none"}}, model=model
  )
  result = read(path)
  assert weights.identify(result.params, result.options).posemb == "none"


def _run(path, **changes):
  return tiny.config(
    init=str(path),
    data__ops="decode|resize(32)",
    **{f"model__{k}": v for k, v in SIZE.items()} | changes,
  )


def test_a_run_takes_the_normalisation_as_text(tmp_path):
  path = save(tmp_path / "x.npz")
  config = _run(path, init_mean="0.485,0.456,0.406/0.229,0.224,0.225")
  _, report = run_checks.setup(config, data=tiny.Data()).fitted_weights()
  assert "mean [0.485, 0.456, 0.406]" in report.notes[0]
  for changes, words in (
    ({"init_mean": "imagnet"}, "config.init: mean.*imagnet"),
    ({"init": None}, "init_mean"),
  ):
    wrong = dataclasses.replace(config, **changes)
    with pytest.raises(ConfigError, match=words):
      run_checks.setup(wrong, data=tiny.Data())


def test_heads_that_nothing_states(tmp_path, monkeypatch):
  """MoCo v3's ViT-S has other heads than the known model of its size."""
  monkeypatch.setattr(timm_names, "known_heads", lambda *size: (2, None))
  path = timm_file(tmp_path)

  def notes_on_heads(read):
    return [note for note in read.notes if "num_heads=2" in note]

  (note,) = notes_on_heads(weights.read(path))
  assert "--config.model.num_heads" in note
  assert not notes_on_heads(read(path))
  # The option of a run is the number of heads of its file.
  config = _run(path)
  assert config.model.num_heads == 4
  params, report = run_checks.setup(config, data=tiny.Data()).fitted_weights()
  block = params["Transformer"]["encoderblock_0"]
  query = block["MultiHeadDotProductAttention_0"]["query"]["kernel"]
  assert query.shape == (48, 4, 12) and not notes_on_heads(report)
  # Also if no known model has its size.
  monkeypatch.setattr(timm_names, "known_heads", lambda *_: (None, "unknown."))
  run_checks.setup(config, data=tiny.Data()).fitted_weights()


def test_a_run_records_the_file_that_it_begins_with(tmp_path):
  path = save(tmp_path / "x.npz")
  config = _run(path)
  run = run_checks.setup(config, data=tiny.Data())
  recorded = run_summary.files(run)["init"]
  assert recorded["path"] == str(path) and len(recorded["digest"]) == 32
  # A resumed run reads no weights, and keeps the record.
  resumed = run_checks.setup(
    dataclasses.replace(config, init=None), data=tiny.Data()
  )
  vars(resumed)["saved"] = {"init": recorded}
  assert run_summary.files(resumed) == {"init": recorded}

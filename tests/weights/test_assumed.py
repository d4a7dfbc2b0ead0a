"""What no array states: assumed in one line, stated by the user, or refused."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict
from series_parts import (
  BEIT,
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
from vit_jax import run_checks, run_summary, train, weights
from vit_jax.config import ConfigError, model_config
from vit_jax.experiment import Experiment
from vit_jax.models.resample import resample_posemb
from vit_jax.tools.exporting import convert
from vit_jax.weights import google, normalisation
from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files import timm_names

IMAGENET = normalisation.NAMED["imagenet"]
BYTES = (np.zeros(3), np.full(3, 1 / 255))  # images from 0 to 255
HEADS = {"num_heads": 4}
BARE = {"verbose": False, **HEADS}  # what a bare file of timm's needs


def read(path, **options):
  """Reads a bare file of timm's."""
  stated = {k: options.pop(k) for k in ("mean", "std", "grid") if k in options}
  return weights.read(path, options=HEADS | options, **stated)


# Pixels.


def embed(params, pixels):
  """Returns the tokens of patches of 8 x 8, with their positions, [n, d]."""
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
  # Google's files have images in [-1, 1].
  assert not weights.read(save(tmp_path / "x.npz")).notes
  # I-JEPA's have ImageNet's mean, also where no file states it.
  model = model_config(**SIZE, pool="gap")
  folder = hf_folder(tmp_path / "i", about={}, model=model, num_classes=0)
  assumed, folded = weights.read(folder).notes
  assert assumed == normalisation.ASSUMED.format("imagenet")
  assert "mean [0.485, 0.456, 0.406]" in folded


# Series that arrays name: their images, and how their authors resize positions.


class Series(NamedTuple):
  """A published series.

  options: What differs from the paper's ViT.
  pixels: Normalisation of its images.
  filter: How its authors resize positions.
  ops: Operations that a file with nothing but arrays gets; None: as their
    normalisation, they are unknown.
  libraries: Those that have its files.
  num_classes: Of the head.
  """

  options: dict[str, Any]
  pixels: str
  filter: str
  ops: str | None = None
  libraries: str = "timm"
  num_classes: int = 0


CROP = "decode(dct='accurate')|resize_small_torch({})|central_crop_torch(32)"
CROP_36, CROP_32 = CROP.format(36), CROP.format(32)
CROP_224 = CROP.replace("(32)", "(224)").format(256)
WHOLE = "decode(dct='accurate')|resize_torch(256, 'bilinear')"
WIDE = dict(mlp_dim=192)  # by the rule of transformers' DINOv2
SERIES = {
  "ViT": Series({}, "half", "zoom", None, "timm hf npz", 3),
  "SigLIP": Series(dict(pool="map"), "half", "zoom", None, "timm hf npz"),
  "DINO": Series({}, "imagenet", "dinov2", None, "timm hf"),
  "DeiT": Series({}, "imagenet", "hf", None, "timm hf", 3),
  "I-JEPA": Series(dict(pool="gap"), "imagenet", "hf", None, "timm hf"),
  "DeiT, distilled": Series(DISTILLED, "imagenet", "hf", CROP_36, "timm hf", 3),
  # Its second head is not in every file.
  "DeiT, of one head": Series(
    dict(name="modern", registers=1, cls_row=False, gelu="erf"),
    *("imagenet", "hf", CROP_36, "timm", 3),
  ),
  "DeiT III": Series(DEIT3, "imagenet", "hf", CROP_32, num_classes=3),
  "DINOv2": Series(DINOV2 | WIDE, "imagenet", "dinov2", CROP_36, "timm hf"),
  "DINOv2, registers": Series(REGISTERS, "imagenet", "bicubic", CROP_36),
  "DINOv3": Series(DINOV3, "imagenet", "hf", WHOLE),
  # One register: images in [0, 1], which DINOv2's four do not have.
  "TIPS v2": Series(REGISTERS | dict(registers=1), "0/1", "bicubic", CROP_32),
  "CLIP": Series(CLIP, "clip", "bicubic", CROP_32, "timm hf openclip"),
  "MAE, fine-tuned": Series(
    POOLED | dict(name="modern", gelu="erf"), "imagenet", "hf", CROP_36
  ),
  "MAE": Series({}, "imagenet", "hf", CROP_36, "timm mae"),
  # Its biases do not tell the size of the images.
  "BEiT": Series(BEIT, "half", "timm", CROP_224, "timm hf"),
  "EVA-02": Series(EVA02, "clip", "hf", CROP_32),
  # Registers without a class token name no series.
  "none": Series(
    DINOV2 | dict(registers=2, class_token=False, pool="gap"),
    *("half", "bicubic"),
  ),
}


def pixels_of(series):
  return normalisation.NAMED.get(series.pixels, ((0.0,) * 3, (1.0,) * 3))


def write(folder, name, library="timm", is_bare=False):
  """Writes random weights of a series; returns the path."""
  series = SERIES[name]
  model = model_config(**SIZE | series.options)
  made = dict(model=model, num_classes=series.num_classes)
  params = dict(our_params(**made))
  mean, std = pixels_of(series)
  folder.mkdir()
  if library == "npz":
    np.savez(folder / "x.npz", **google.write(params))
    return folder / "x.npz"
  if library in ("hf", "mae"):
    images = {"image_mean": mean, "image_std": std}
    kind = {"model_type": "vit_mae"} if library == "mae" else {}
    return hf_folder(folder, (32, 32), about=images, **made, **kind)
  if library == "openclip":
    return openclip_folder(folder, params=params)
  if name == "MAE":
    params[POS_EMBEDDING] = params[POS_EMBEDDING].copy()
    params[POS_EMBEDDING][:, 0] = 0
  about = {"architecture": "vit", "model_args": {"num_heads": 4}}
  about["pretrained_cfg"] = {"mean": mean, "std": std}
  file = timm_file(
    folder, None if is_bare else about, model=model, params=params
  )
  return file if is_bare else folder


@pytest.mark.parametrize(
  "name, library",
  [
    pytest.param(
      name,
      library,
      marks=pytest.mark.nightly if library in ("npz", "hf") else (),
    )
    for name, series in SERIES.items()
    for library in series.libraries.split()
  ],
)
def test_positions_are_resized_as_by_the_authors(tmp_path, name, library):
  """Whatever the library does."""
  path = write(tmp_path / "x", name, library)
  assert weights.read(path).posemb_filter == SERIES[name].filter


@pytest.mark.parametrize("name", SERIES)
def test_the_images_of_a_series(tmp_path, name):
  series = SERIES[name]
  model = model_config(**SIZE | series.options)
  path = write(tmp_path / "x", name, is_bare=True)
  result = read(path)
  if series.ops is None:
    assert result.pixels is None and normalisation.UNSTATED in result.notes
    return
  first, *_ = result.notes
  assert f"{name.partition(',')[0]}'s are assumed" in first
  assert "--config.init_mean" in first and series.ops in first
  assert (result.pixels, result.ops) == (pixels_of(series), series.ops)
  stated = read(path, mean="half")
  assert (stated.pixels, stated.ops) == (normalisation.HALF, series.ops)
  # What the reader states of the model is what it was made with.
  got = weights.identify(result.params, result.options)
  if hasattr(model, "layer_scale"):
    got = dataclasses.replace(got, layer_scale=model.layer_scale)
  assert name == "MAE" or got == model


def test_dinov2_resizes_positions_to_its_processor_s_images(tmp_path):
  """Published tables are of 37 x 37 patches, images of 16 x 16."""
  model = model_config(**SIZE | DINOV2 | WIDE)
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


@pytest.mark.parametrize(
  "name, to",
  [
    pytest.param("DINOv2", "orbax", marks=pytest.mark.slow),
    ("DeiT", "timm"),
    ("DeiT", "npz"),
  ],
)
def test_what_is_written_is_resized_as_the_file(tmp_path, name, to):
  """Also if the filter is in no array: DeiT's arrays are those of ViT."""
  path = write(tmp_path / "x", name)
  vit = vit_jax.load(path, verbose=False)
  written = str(tmp_path / f"again{convert.WRITERS[to].suffix or ''}")
  notes = convert.convert(vit, written, to)
  stated = {}
  if to == "npz":  # it has no place for it
    assert "posemb_filter='hf'" in "\n".join(notes)
    stated = {"posemb_filter": "hf", "gelu": "erf", "num_heads": 4}
  again, wanted = (
    vit_jax.load(file, image_size=(48, 24), verbose=False, **options)
    for file, options in ((written, stated), (path, {}))
  )
  assert again.report.resized
  assert again.config == wanted.config
  assert_same(*(flatten_dict(v.params, sep="/") for v in (again, wanted)))


# The model.


def test_a_bare_file_says_what_its_model_is_taken_for(tmp_path):
  path = timm_file(tmp_path)
  _, note, of_head = vit_jax.load(path, **BARE).report.notes
  assert "loss" in of_head
  for part in ("class token as output", "gelu='erf'", "square grid"):
    assert part in note
  _, note, _ = vit_jax.load(path, gelu="tanh", grid=(4, 4), **BARE).report.notes
  assert "class token as output" in note and "gelu='erf'" not in note
  timm_file(tmp_path, {"architecture": "vit"})
  vit = vit_jax.load(path, **BARE)
  assert len(vit.report.notes) == 1  # of the pixels
  path = timm_file(tmp_path / "gap", model=model_config(**SIZE, pool="gap"))
  notes = vit_jax.load(path, **BARE).report.notes
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
  vit = vit_jax.load(path, image_size=image, **options, **BARE)
  assert bool(vit.report.resized) == resized
  notes = [note for note in vit.report.notes if "positions" in note]
  assert len(notes) == (read_as is not None)
  assert all(read_as in note for note in notes)
  if trained == (16, 48):
    assert "got 12 patches" in message(path, **BARE)


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
  vit = vit_jax.load(path, grid=grid, **BARE)
  assert vit.config.cls_row is False
  assert vit.image_size[1] == (64 if grid else 32)


def test_positions_that_a_file_of_timm_s_lacks(tmp_path):
  model = model_config(**SIZE, pool="gap", posemb="none")
  path = timm_file(tmp_path, model=model)
  assert "position table" in message(path, **HEADS)
  result = read(path, posemb="none")
  assert weights.identify(result.params, result.options).posemb == "none"
  args = HEADS | {"pos_embed": "none"}
  timm_file(tmp_path, {"model_args": args}, model=model)
  result = read(path)
  assert weights.identify(result.params, result.options).posemb == "none"


# Runs.


def run_config(path, side=32, **changes):
  return tiny.config(
    init=str(path) if path else None,
    data__ops=f"decode|resize({side})",
    **{f"model__{k}": v for k, v in SIZE.items()} | changes,
  )


def checked(config):
  return run_checks.setup(config, data=tiny.Data())


def test_a_run_takes_the_normalisation_as_text(tmp_path):
  config = run_config(
    save(tmp_path / "x.npz"), init_mean="0.485,0.456,0.406/0.229,0.224,0.225"
  )
  _, report = checked(config).fitted_weights()
  assert "mean [0.485, 0.456, 0.406]" in report.notes[0]
  for changes, words in (
    ({"init_mean": "imagnet"}, "config.init: mean.*imagnet"),
    ({"init": None}, "init_mean"),
  ):
    with pytest.raises(ConfigError, match=words):
      checked(dataclasses.replace(config, **changes))


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
  config = run_config(path)
  assert config.model.num_heads == 4
  params, report = checked(config).fitted_weights()
  block = params["Transformer"]["encoderblock_0"]
  query = block["MultiHeadDotProductAttention_0"]["query"]["kernel"]
  assert query.shape == (48, 4, 12) and not notes_on_heads(report)


def test_a_run_records_the_file_that_it_begins_with(tmp_path):
  path = save(tmp_path / "x.npz")
  config = run_config(path)
  recorded = run_summary.files(checked(config))["init"]
  assert recorded["path"] == str(path) and len(recorded["digest"]) == 32
  # A resumed run reads no weights, and keeps the record.
  resumed = checked(dataclasses.replace(config, init=None))
  assert resumed.posemb_filter == "zoom"  # the paper's
  vars(resumed)["saved"] = {"init": recorded}
  assert run_summary.files(resumed) == {"init": recorded}


@pytest.mark.nightly
def test_a_run_and_its_probe_are_resized_as_the_weights_they_began_with(
  tmp_path,
):
  def config(path, side=32, **changes):
    data = {"dataset": "digits", "split": "train[:48]", "batch_size": 48}
    return run_config(
      path,
      side,
      **{f"data__{k}": v for k, v in data.items()},
      model__name="modern",
      model__layer_scale=1e-5,
      model__mlp_dim=192,
      total_steps=2,
      optim__lr=1e-12,
      **changes,
    )

  def positions(path):
    """The filter and the positions of a trial at 1.5 times the size."""
    run = run_checks.setup(config(path, 48))
    params, _ = run.fitted_weights()
    table = params["Transformer"]["posembed_input"]["pos_embedding"]
    return run.posemb_filter, np.asarray(table)

  path, run = write(tmp_path / "x", "DINOv2"), tmp_path / "run"
  val = {"kind": "classification", "split": "train[48:96]"}
  val["ops"] = "decode|resize(32)"
  begun = config(path, init_head="linear_probe", evals={"val": val})
  train.train_and_evaluate(begun, str(run))
  name, table = positions(path)
  assert name == "dinov2"
  for checkpoint in (run / "probe", run):
    again, same_table = positions(checkpoint)
    assert again == "dinov2"
    # Two steps with a rate of 1e-12.
    np.testing.assert_allclose(same_table, table, atol=1e-6)
  resumed = Experiment(begun, str(run))
  assert (resumed.start, resumed.posemb_filter) == (2, "dinov2")

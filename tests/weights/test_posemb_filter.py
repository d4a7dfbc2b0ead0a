"""How positions are resized: as the authors do, from a file and from ours."""

import numpy as np
import pytest
import tiny
import weight_files
from flax.traverse_util import flatten_dict
from series_parts import (
  BEIT,
  CLIP,
  DEIT3,
  DINOV2,
  DISTILLED,
  EVA02,
  REGISTERS,
)  # fmt: skip
from weight_files import assert_same, hf_folder, openclip_folder

import vit_jax
from vit_jax import train, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import defaults, freeze, model_config
from vit_jax.experiment import Experiment
from vit_jax.run_checks import setup
from vit_jax.tools.exporting import convert
from vit_jax.weights import google, normalisation
from vit_jax.weights.weights_file import POS_EMBEDDING

SIZE = weight_files.SIZE | dict(mlp_dim=192)
# Series -> model, normalisation, number of classes, filter, libraries.
SERIES = {
  "ViT": ({}, "half", 3, "zoom", "timm hf npz"),
  "SigLIP": (dict(pool="map"), "half", 0, "zoom", "timm hf npz"),
  "MAE": ({}, "imagenet", 0, "hf", "timm mae"),
  "DINO": ({}, "imagenet", 0, "dinov2", "timm hf"),
  "DeiT": ({}, "imagenet", 3, "hf", "timm hf"),
  "I-JEPA": (dict(pool="gap"), "imagenet", 0, "hf", "timm hf"),
  "DeiT distilled": (DISTILLED, "imagenet", 3, "hf", "timm hf"),
  "DeiT III": (DEIT3, "imagenet", 3, "hf", "timm"),
  "DINOv2": (DINOV2, "imagenet", 0, "dinov2", "timm hf"),
  "DINOv2 registers": (REGISTERS, "imagenet", 0, "bicubic", "timm"),
  "CLIP": (CLIP, "clip", 0, "bicubic", "timm hf openclip"),
  "BEiT": (BEIT, "half", 0, "timm", "timm hf"),
  "EVA-02": (EVA02, "clip", 0, "hf", "timm"),
  "of no series": (
    *(DINOV2 | dict(class_token=False, pool="gap"), "half", 3),
    *("bicubic", "timm"),
  ),
}
SIDES = (48, 24)  # of images of another size
CASES = [(n, s) for n, v in SERIES.items() for s in v[-1].split()]


def write(folder, series, library):
  """Writes random weights of a series; returns the path."""
  options, mean, num_classes, *_ = SERIES[series]
  pixels = normalisation.NAMED[mean]._asdict()
  model = model_config(**SIZE | options)
  made = dict(model=model, num_classes=num_classes)
  params = dict(weight_files.our_params(**made))
  folder.mkdir()
  if library == "npz":
    np.savez(folder / "x.npz", **google.write(params))
    return folder / "x.npz"
  if library in ("hf", "mae"):
    images = {"image_mean": pixels["mean"], "image_std": pixels["std"]}
    kind = {"model_type": "vit_mae"} if library == "mae" else {}
    return hf_folder(folder, (32, 32), about=images, **made, **kind)
  if library == "openclip":
    return openclip_folder(folder, params=params)
  if series == "MAE":
    params[POS_EMBEDDING] = params[POS_EMBEDDING].copy()
    params[POS_EMBEDDING][:, 0] = 0
  about = {"architecture": "vit", "model_args": {"num_heads": 4}}
  about["pretrained_cfg"] = pixels
  weight_files.timm_file(folder, about, model=model, params=params)
  return folder


@pytest.mark.parametrize(
  "series, library",
  [
    pytest.param(
      *case, marks=pytest.mark.nightly if case[1] in ("npz", "hf") else ()
    )
    for case in CASES
  ],
)
def test_it_is_that_of_the_authors_whatever_the_library(
  tmp_path, series, library
):
  path = write(tmp_path / "x", series, library)
  read = weights.read(path)
  assert read.posemb_filter == SERIES[series][3]


@pytest.mark.parametrize(
  "series, to",
  [
    pytest.param("DINOv2", "orbax", marks=pytest.mark.slow),
    ("DeiT", "timm"),
    ("DeiT", "npz"),
    pytest.param("CLIP", "openclip", marks=pytest.mark.nightly),
  ],
)
def test_what_is_written_is_resized_as_the_file(tmp_path, series, to):
  """Also if the filter is in no array: DeiT's arrays are those of ViT."""
  path = write(tmp_path / "x", series, "timm")
  vit = vit_jax.load(path, verbose=False)
  written = str(tmp_path / f"again{convert.WRITERS[to].suffix or ''}")
  notes = convert.convert(vit, written, to)
  lacks_it = to == "npz"  # it has no place for it
  assert ("posemb_filter='hf'" in "\n".join(notes)) == lacks_it
  stated = {"posemb_filter": "hf"} if lacks_it else {}
  if to == "npz":
    stated |= {"gelu": "erf", "num_heads": 4}
  size = {"image_size": SIDES, "verbose": False}
  again = vit_jax.load(written, **size, **stated)
  wanted = vit_jax.load(path, **size)
  assert again.report.resized
  assert again.config == wanted.config
  assert_same(*(flatten_dict(v.params, sep="/") for v in (again, wanted)))


def config(init, side=32, **changes):
  ops = f"decode|resize({side})"
  c = defaults()
  c.init, c.model.name, c.model.layer_scale = init, "modern", 1e-5
  val = {"kind": "classification", "split": "train[48:96]", "ops": ops}
  changes = (
    dict(
      {f"model__{k}": v for k, v in SIZE.items()},
      data__dataset="digits",
      data__split="train[:48]",
      data__ops=ops,
      data__batch_size=48,
      total_steps=2,
      optim__lr=1e-12,
      evals={"val": val},
    )
    | changes
  )
  tiny.apply(c, changes)
  return freeze(c)


def positions(init, side):
  """Returns the filter and the positions of a run, before its first step."""
  experiment = setup(config(str(init), side))
  params, _ = experiment.fitted_weights()
  table = params["Transformer"]["posembed_input"]["pos_embedding"]
  return experiment.posemb_filter, np.asarray(table)


@pytest.mark.nightly
def test_a_run_and_its_probe_are_resized_as_the_weights_they_began_with(
  tmp_path,
):
  path, run = write(tmp_path / "x", "DINOv2", "timm"), tmp_path / "run"
  begun = config(str(path), init_head="linear_probe")
  train.train_and_evaluate(begun, str(run))
  name, table = positions(path, 48)  # a trial at 1.5 times the size
  assert name == "dinov2"
  for checkpoint in (run / "probe", run):
    again, same_table = positions(checkpoint, 48)
    assert again == "dinov2"
    # Two steps with a rate of 1e-12.
    np.testing.assert_allclose(same_table, table, atol=1e-6)
    vit = vit_jax.load(checkpoint, image_size=48, verbose=False)
    same_table = vit.params["Transformer"]["posembed_input"]["pos_embedding"]
    np.testing.assert_allclose(same_table, table, atol=1e-6)
  params, metadata = checkpointer.load_params(str(run))
  del metadata["posemb_filter"]  # as before it was stated
  checkpointer.write_params(str(tmp_path / "old"), params, metadata)
  again, other = positions(tmp_path / "old", 48)
  assert again == "zoom" and np.abs(other - table).max() > 0.1
  resumed = Experiment(begun, str(run))
  assert (resumed.start, resumed.posemb_filter) == (2, "dinov2")


def test_from_scratch_it_is_the_paper_s():
  assert setup(config(None)).posemb_filter == "zoom"

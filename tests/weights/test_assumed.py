"""What no array states: assumed in one line, stated by the user, or refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from foreign import random_params
from weight_files import (
  MODEL,
  SIZE,
  hf_folder,
  message,
  nested,
  orbax,
  our_params,
  save,
)

import vit_jax
from vit_jax import run_checks, run_summary, weights
from vit_jax.commands import evaluate
from vit_jax.config import ConfigError, model_config
from vit_jax.weights import normalisation, safetensors_file
from vit_jax.zoo.files import timm, timm_names

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _timm(path, params=None, model=MODEL):
  arrays = timm.write(params or our_params(), model)
  safetensors_file.write(path, arrays, {})
  return path


def load(path, **options):
  return vit_jax.load(path, verbose=False, num_heads=4, **options)


def _logits(vit, images):
  """Logits of any floats: `vit` itself takes [-1, 1] alone."""
  images = jnp.asarray(images)
  return vit.model.apply({"params": vit.params}, images)[0]


# Pixels.


@pytest.mark.slow
def test_images_that_nothing_describes(tmp_path):
  """A bare file says so; a stated normalisation is that of its training."""
  path = _timm(tmp_path / "x.safetensors")
  bare = load(path)
  assert normalisation.UNSTATED in bare.report.notes
  pixels = np.random.default_rng(0).uniform(0, 1, (1, 32, 32, 3)).astype("f")
  trained_on = (pixels - np.float32(IMAGENET[0])) / np.float32(IMAGENET[1])
  # The bare model gets what it was trained on, whatever the range is.
  expected = _logits(bare, trained_on.astype("f"))
  for mean, std in (
    ("imagenet", None),
    IMAGENET,
    ("0.485,0.456,0.406", "0.229,0.224,0.225"),
    ("0.485,0.456,0.406/0.229,0.224,0.225", None),
  ):
    vit = load(path, mean=mean, std=std)
    got, _ = vit(2 * pixels - 1)
    # Values of about 1 after 2 blocks, rounded at 6e-8 in other orders.
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert normalisation.UNSTATED not in vit.report.notes


def test_images_from_0_to_255(tmp_path):
  path = _timm(tmp_path / "x.safetensors")
  images = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3))
  small = {  # a kernel for values 128 times as large
    k: v / 128 if k == "embedding/kernel" else v
    for k, v in our_params().items()
  }
  raw = load(_timm(tmp_path / "raw.safetensors", small))
  expected = _logits(raw, images.astype("f"))
  vit = load(tmp_path / "raw.safetensors", mean=0, std=1 / 255)
  got, _ = vit((images / 127.5 - 1).astype("f"))
  np.testing.assert_allclose(got, expected, atol=2e-5)
  assert load(path, mean="half").report.notes == load(path).report.notes[1:]


def test_every_file_that_states_no_pixels_says_so(tmp_path):
  folder = hf_folder(tmp_path / "hf")
  assert normalisation.UNSTATED not in weights.read(folder).notes
  (folder / "preprocessor_config.json").unlink()
  tree = orbax(tmp_path / "tree", nested(our_params()))
  for path in (folder, tree):
    assert normalisation.UNSTATED in weights.read(path).notes
    stated = weights.read(path, mean="imagenet")
    assert normalisation.UNSTATED not in stated.notes
    assert "mean [0.485, 0.456, 0.406]" in " ".join(stated.notes)
  # Google's files have images in [-1, 1].
  assert not weights.read(save(tmp_path / "x.npz")).notes


@pytest.mark.parametrize(
  "mean, std, error",
  [
    ("imagnet", 1, "mean: got 'imagnet', expected a number, or one for each"),
    ("imagenet", "0.5", "mean, std: got 'imagenet', '0.5', expected mean, one"),
    (0.5, None, "mean, std: got 0.5, None, expected mean, one of half,"),
    (None, 0.5, "mean, std: got None, 0.5, expected mean, one of half,"),
    (0.5, 0, "std: got 0, expected a number, or one for each channel"),
    ("0.5", "a,b,c", "std: got 'a,b,c', expected a number, or one for each"),
    ("123.7,116.3,103.5", "58.4,57.1,57.4", "mean: got '123.7,116.3,103.5'"),
    (0, 255, "std: got 255, expected a number, or one for each channel"),
  ],
)
def test_a_normalisation_that_is_none(tmp_path, mean, std, error):
  path = save(tmp_path / "x.npz")
  assert message(path, mean=mean, std=std).startswith(error)


def test_a_normalisation_of_other_channels(tmp_path):
  text = message(save(tmp_path / "x.npz"), mean=(0.5, 0.4), std=0.5)
  assert "one number each, or 3 for the channels" in text


# The model.


def test_a_bare_file_says_what_its_model_is_taken_for(tmp_path):
  path = _timm(tmp_path / "x.safetensors")
  _, note, of_head = load(path).report.notes
  assert "does not state the loss of its head" in of_head
  assert note.startswith(
    "the file has only arrays; assumed: the class token as output, gelu='erf',"
    " a square grid of patches"
  )
  _, note, _ = load(path, gelu="tanh", grid=(4, 4)).report.notes
  assert "assumed: the class token as output. To change" in note
  (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit"}))
  assert len(load(path).report.notes) == 1  # of the pixels


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_other_poolings(tmp_path, pool):
  """A pooling by attention has arrays, which tell it."""
  model = model_config(
    variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4, pool=pool
  )
  params = random_params(model, 11, (32, 32))
  vit = load(_timm(tmp_path / "x.safetensors", params, model))
  assert ("the mean of the tokens" in vit.report.notes[1]) == (pool == "gap")


@pytest.mark.parametrize(
  "image, options, resized, text",
  [
    # 16 patches are 8 x 2 as well as 4 x 4.
    ((64, 16), {}, False, "positions are read as 8 x 2 patches; see grid="),
    ((64, 16), {"grid": (8, 2)}, False, None),
    ((64, 16), {"grid": (4, 4)}, True, None),
    ((32, 32), {}, False, None),
    ((48, 48), {}, True, None),
    ((64, 32), {}, True, None),
  ],
)
def test_a_grid_of_two_readings(tmp_path, image, options, resized, text):
  path = _timm(tmp_path / "x.safetensors")
  vit = load(path, image_size=image, **options)
  assert bool(vit.report.resized) == resized
  notes = [note for note in vit.report.notes if "positions" in note]
  assert len(notes) == (text is not None) and all(text in n for n in notes)


def test_a_grid_that_is_no_square(tmp_path):
  """The images decide where a table has no square reading."""
  model = model_config(
    variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4, pool="gap"
  )
  params = random_params(model, 11, (16, 48))
  path = _timm(tmp_path / "x.safetensors", params, model)
  assert "got 12 patches" in message(path, num_heads=4)
  vit = load(path, image_size=(16, 48))
  assert not vit.report.resized
  assert any("as 2 x 6 patches" in n for n in vit.report.notes)


def test_published_grids_are_square(tmp_path):
  """The images do not change how a published file is read, but it is said."""
  vit = vit_jax.load(save(tmp_path / "x.npz"), image_size=(64, 16))
  assert list(vit.report.resized.values()) == [((4, 4), (8, 2))]
  _, note = vit.report.notes  # the first is on the head
  assert "are read as 4 x 4 patches" in note


@pytest.mark.parametrize("grid, num_rows", [(None, 16), ((2, 8), 16)])
def test_a_class_token_without_a_row(tmp_path, grid, num_rows):
  """FlexiViT's table is square without a row for its class token."""
  params = random_params(MODEL, 11, (32, 32))
  table = "Transformer/posembed_input/pos_embedding"
  params[table] = params[table][:, :num_rows]
  safetensors_file.write(
    tmp_path / "x.safetensors", timm.write(params, MODEL), {}
  )
  result = weights.read(
    tmp_path / "x.safetensors", grid=grid, options={"num_heads": 4}
  )
  assert not result.has_cls_row and result.options["cls_row"] is False
  vit = load(tmp_path / "x.safetensors", grid=grid)
  assert vit.config.cls_row is False
  assert vit.image_size[1] == (64 if grid else 32)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_positions_that_a_file_of_timm_s_lacks(tmp_path, pool):
  model = model_config(
    variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4, pool=pool
  )
  params = random_params(model, 11, (32, 32))
  params.pop("Transformer/posembed_input/pos_embedding")
  path = tmp_path / "x.safetensors"
  none = dataclasses.replace(model, posemb="none")
  safetensors_file.write(path, timm.write(params, none), {})
  assert "pos_embedding: missing, expected a position table" in message(
    path, num_heads=4
  )
  assert load(path, posemb="none", image_size=32).config.posemb == "none"
  config = {"model_args": {"num_heads": 4, "pos_embed": "none"}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert load(path, image_size=32).config.posemb == "none"


def test_positions_that_may_be_lost(tmp_path):
  table = "Transformer__posembed_input__pos_embedding"
  path = save(tmp_path / "x.npz", **{table: None})
  text = message(path, image_size=32)
  assert "pos_embedding: missing, expected a position table" in text
  vit = vit_jax.load(path, posemb="none", image_size=32)
  assert vit.config.posemb == "none"


def test_a_depth_that_the_arrays_contradict(tmp_path):
  path = save(tmp_path / "x.npz")
  assert "depth: got 4, expected 2 by the arrays" in message(path, depth=4)


def test_blocks_that_a_config_counts(tmp_path):
  folder = hf_folder(tmp_path / "m", num_hidden_layers=3)
  assert "num_hidden_layers: got 3, expected 2" in message(folder)


def test_a_run_and_an_evaluation_take_it_as_text(tmp_path):
  path = save(tmp_path / "x.npz")
  changes = {f"model__{k}": v for k, v in SIZE.items()}
  config = tiny.config(
    init=str(path),
    init_mean="0.485,0.456,0.406/0.229,0.224,0.225",
    data__ops="decode|resize(32)",
    **changes,
  )
  _, report = run_checks.setup(config, data=tiny.Data()).fitted_weights()
  assert "mean [0.485, 0.456, 0.406]" in report.notes[0]
  wrong = dataclasses.replace(config, init_mean="imagnet")
  with pytest.raises(ConfigError, match="config.init: mean, std: got 'imagnet"):
    run_checks.setup(wrong, data=tiny.Data())
  alone = dataclasses.replace(config, init=None)
  with pytest.raises(ConfigError, match="init_mean: .* config.init"):
    run_checks.setup(alone, data=tiny.Data())
  args = evaluate.parse([f"--checkpoint={path}", "--mean=clip", "--knn=digits"])
  assert args.flags["mean"] == "clip"


def test_heads_that_nothing_states(tmp_path, monkeypatch):
  """MoCo v3's ViT-S has other heads than the known model of its size."""
  known = lambda *size: (2, None)
  monkeypatch.setattr(timm_names, "known_heads", known)
  path = _timm(tmp_path / "x.safetensors")

  def notes_on_heads(read):
    return [note for note in read.notes if "num_heads=2" in note]

  (note,) = notes_on_heads(weights.read(path))
  assert "--config.model.num_heads" in note
  assert not notes_on_heads(weights.read(path, options={"num_heads": 4}))
  # The option of a run is the number of heads of its file.
  config = tiny.config(
    init=str(path),
    data__ops="decode|resize(32)",
    **{f"model__{k}": v for k, v in SIZE.items()},
  )
  assert config.model.num_heads == 4
  params, report = run_checks.setup(config, data=tiny.Data()).fitted_weights()
  block = params["Transformer"]["encoderblock_0"]
  query = block["MultiHeadDotProductAttention_0"]["query"]["kernel"]
  assert query.shape == (48, 4, 12) and not notes_on_heads(report)
  with monkeypatch.context() as patch:  # also if no known model has its size
    patch.setattr(timm_names, "known_heads", lambda *_: (None, "unknown."))
    run_checks.setup(config, data=tiny.Data()).fitted_weights()
  (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit"}))
  assert not notes_on_heads(weights.read(path))


def test_a_config_that_pools_nothing(tmp_path):
  """Virchow's; its users take the class token from timm's tokens."""
  path = _timm(tmp_path / "x.safetensors")
  args = {"num_heads": 4, "global_pool": ""}
  config = {"architecture": "vit", "model_args": args, "global_pool": ""}
  (tmp_path / "config.json").write_text(json.dumps(config))
  read = weights.read(path)
  assert weights.identify(read.params, read.options).pool == "token"


def test_a_run_records_the_file_that_it_begins_with(tmp_path):
  path = save(tmp_path / "x.npz")
  config = tiny.config(
    init=str(path),
    data__ops="decode|resize(32)",
    **{f"model__{k}": v for k, v in SIZE.items()},
  )
  run = run_checks.setup(config, data=tiny.Data())
  recorded = run_summary.files(run)["init"]
  assert recorded["path"] == str(path) and len(recorded["digest"]) == 32
  # A resumed run reads no weights, and keeps the record.
  resumed = run_checks.setup(
    dataclasses.replace(config, init=None), data=tiny.Data()
  )
  vars(resumed)["saved"] = {"init": recorded}
  assert run_summary.files(resumed) == {"init": recorded}

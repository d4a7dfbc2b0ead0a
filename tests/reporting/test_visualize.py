"""`vit-jax visualize`: files, page, and what it refuses."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import class_names
from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.commands import visualize as visualize_command
from vit_jax.config import (
  CheckpointConfig,
  ClassificationConfig,
  Config,
  DataConfig,
  to_dict,
)
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.step import TrainState
from vit_jax.tools.reporting import model_figures, visualize

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = str(DATA / "vit_linen_names.weights.npz")  # 32 px, 4 x 4 patches
MAP = str(DATA / "bv_map.weights.npz")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  path = tmp_path_factory.mktemp("photos")
  rng = np.random.default_rng(0)
  for name in ("a b", "c"):
    pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path / f"{name}.png")
  return path


def call(*argv):
  return visualize.run(visualize_command.parse([str(x) for x in argv]))


def test_one_model(photos, tmp_path, capsys):
  out = tmp_path / "new" / "inside"
  out.mkdir(parents=True)
  (out / "index.html").write_text("before")
  (out / "linked").hardlink_to(out / "index.html")
  written = call(TOKEN, photos, f"--out={out}", "--patch=2,4")
  assert [str(path.relative_to(out)) for path in written] == [
    "index.html",
    *("filters.svg", "positions.svg", "distance.svg", "heads.svg"),
    "rollout.png",
    *("rollout/001_a_b.png", "rollout/002_c.png"),
  ]
  printed = capsys.readouterr().out
  assert f"{TOKEN}: B/8, 2 images\n" in printed
  assert printed.endswith(
    f"wrote     {out}/rollout.png\nwrote     {out}/rollout/, 2 images\n"
  )
  text = (out / "index.html").read_text()
  assert "http" not in text and not re.search(r"url\((?!#)", text)
  assert text.count("<svg ") == 4
  assert re.findall(r'src="data:image/([a-z+]+);', text) == ["jpeg"] * 2
  # It was not written over, so that an end in the middle leaves the old page.
  assert (out / "linked").read_text() == "before"
  assert re.search(r"a b\.png → [^<]+ \d+%<", text)
  assert "Left out" not in text
  with Image.open(out / "rollout" / "002_c.png") as image:
    assert image.size == (3 * 192 + 2 * 4, 192)


def test_imagenet_s_classes_are_in_words():
  vit = vit_jax.load(TOKEN, verbose=False)
  wnids = class_names.imagenet1k()[: vit.num_classes]
  vit = dataclasses.replace(vit, class_names=wnids)
  black = np.zeros((32, 32, 3), np.uint8)
  (text,) = visualize.captions_of(["x/a.png"], vit, [black])
  assert re.fullmatch(r"a\.png → .+ \(n\d+\) \d+%", text)


def test_numbers_of_a_regression_are_no_shares():
  vit = vit_jax.load(TOKEN, verbose=False)
  names = tuple(f"n{i}" for i in range(vit.num_classes))
  vit = dataclasses.replace(vit, loss="regression", class_names=names)
  black = np.zeros((32, 32, 3), np.uint8)
  (text,) = visualize.captions_of(["x/a.png"], vit, [black])
  numbers = np.asarray(vit.probabilities(vit.params, black[None]))[0]
  assert text == "a.png → " + ", ".join(
    f"{name} {value:.4g}" for name, value in zip(names, numbers, strict=True)
  )
  maps = np.ones((1, 4, 4), np.float32)
  model = model_figures.InspectedModel(
    "", "", vit, black[None], [text], None, maps, ""
  )
  section = model_figures.rollouts([model], 1)
  assert section.text.endswith(" Below are the predicted numbers.")


@pytest.mark.slow  # two models are compiled
def test_models_side_by_side(photos, tmp_path):
  written = call(
    TOKEN, photos / "c.png", f"--beside={MAP}", f"--out={tmp_path}"
  )
  names = [path.name for path in written]
  assert names == [
    "index.html",
    *(
      f"{kind}_{name}.weights.svg"
      for kind in ("filters", "positions", "distance", "heads")
      for name in ("vit_linen_names", "bv_map")
    ),
    *("rollout.png", "001_c.png"),
  ]
  text = (tmp_path / "index.html").read_text()
  assert "the class token, the probe that pools the tokens" in text
  assert (
    "Each image beside the maps of vit_linen_names.weights, bv_map." in text
  )


def test_published_weights_without_images(tmp_path, capsys):
  call(MAP, f"--out={tmp_path}")
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    *("filters.svg", "index.html", "positions.svg")
  ]
  left_out = [
    line.removeprefix("left out  ")
    for line in capsys.readouterr().out.splitlines()
    if line.startswith("left out")
  ]
  assert left_out == [
    "images (none were given, and published weights come without. Name some:"
    " vit-jax visualize CHECKPOINT IMAGE)",
    "Mean attention distance: bv_map.weights, no images were given",
    "Attention of one patch: bv_map.weights, no images were given",
    "Where the model looks: bv_map.weights, no images were given",
  ]


def test_all_errors_at_once(photos, tmp_path):
  file = tmp_path / "file"
  file.write_text("no image")
  with pytest.raises(ValueError) as e:
    call(
      *(TOKEN, photos, file, tmp_path / "none.png"),
      *(f"--beside={tmp_path / 'none'}", f"--out={file}", "--patch=5,1"),
    )
  lines = str(e.value).splitlines()
  assert [line.split(": ")[0] for line in lines[:1] + lines[2:]] == [
    "--out",
    str(file),
    str(tmp_path / "none.png"),
    "--patch",
  ]
  assert lines[1].startswith(f"got '{tmp_path}/none', which does not exist;")
  assert lines[-1].startswith("--patch: got 5,1, expected up to 4,4, the patch")


def test_broken_images_of_a_folder_are_named_and_left_out(
  photos, tmp_path, capsys
):
  folder = tmp_path / "photos"
  shutil.copytree(photos, folder)
  (folder / "a0.png").write_text("no image")
  written = call(TOKEN, folder, f"--out={tmp_path / 'inside'}")
  printed = capsys.readouterr().out
  number = len(list(photos.iterdir()))
  assert f"{number} images\n" in printed
  assert f"left out  {folder}/a0.png: got 8 bytes that are no image" in printed
  page = written[0].read_text().replace("<wbr>", "")
  assert f"{folder}/a0.png: got 8 bytes" in page
  alone = tmp_path / "alone"
  alone.mkdir()
  (folder / "a0.png").rename(alone / "a0.png")
  with pytest.raises(ValueError, match="a0.png: got 8 bytes"):
    call(TOKEN, alone, f"--out={tmp_path / 'none'}")
  assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  argv = visualize_command.parse([TOKEN, f"--out={tmp_path}/file/inside"])
  with pytest.raises(SystemExit) as error:
    visualize.main(argv)
  text = f"--out: got '{tmp_path}/file/inside': Not a directory."
  assert str(error.value) == text


@pytest.mark.parametrize("text", ["3", "0,1"])
def test_a_patch_is_a_row_and_a_column(text, capsys):
  with pytest.raises(SystemExit):
    visualize_command.parse(["x", "--out=y", f"--patch={text}"])
  assert f"got {text!r}, expected ROW,COLUMN from 1" in capsys.readouterr().err


@pytest.mark.slow
def test_images_of_the_data_that_a_run_is_scored_on(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(visualize, "NUM_IMAGES", 26)
  model = ViTConfig(variant="B/4", width=8, depth=2, mlp_dim=8, num_heads=2)
  config = Config(
    model=model,
    data=DataConfig(dataset="digits", ops="decode|resize(16)"),
    evals=(ClassificationConfig(split="test", ops="decode|resize(16)"),),
  )
  run = tmp_path / "run"
  run.mkdir()
  (run / "config.json").write_text(json.dumps(to_dict(config)))
  params = build(model, 10).init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  metadata = {
    "model": to_dict(model),
    "image_size": [16, 16],
    "grid": [4, 4],
    "num_classes": 10,
    "class_names": list("0123456789"),
    "preprocessing": {"ops": "decode|resize(16)"},
  }
  checkpointer = Checkpointer(str(run), CheckpointConfig())
  state = TrainState(jnp.int32(2), params["params"], ())
  checkpointer.save(2, state, metadata)
  checkpointer.close()
  written = call(run, f"--out={tmp_path / 'out'}")
  printed = capsys.readouterr().out
  assert "images of digits, test\n" in printed
  assert f"{run}: B/4, 26 images\n" in printed
  assert "2 more images, whose maps are in rollout/" in printed
  files = [path.name for path in written if path.parent.name == "rollout"]
  # Spread over the whole split of 500 images, with their true classes.
  assert len(files) == 26
  assert re.fullmatch(r"001_record_0__\d_\.png", files[0])
  assert re.fullmatch(r"026_record_499__\d_\.png", files[-1])

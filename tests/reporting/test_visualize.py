"""`vit-jax visualize`: files, page, and what it refuses."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
from fake_runs import MODEL, of_model, write, write_checkpoint
from PIL import Image

import vit_jax
from vit_jax import class_names
from vit_jax.commands import visualize as visualize_command
from vit_jax.config import ClassificationConfig, Config, DataConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.tools.reporting import visualize

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = str(DATA / "vit_linen_names.weights.npz")  # 32 px, 4 x 4 patches
MAP = str(DATA / "bv_map.weights.npz")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  """Two images, and between them a file that is none."""
  path = tmp_path_factory.mktemp("photos")
  rng = np.random.default_rng(0)
  for name in ("a b", "c"):
    pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path / f"{name}.png")
  (path / "b.png").write_text("no image")
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
  assert f"left out  {photos}/b.png: got 8 bytes" in printed
  text = (out / "index.html").read_text()
  assert f"{photos}/b.png: got 8 bytes" in text.replace("<wbr>", "")
  assert "http" not in text and not re.search(r"url\((?!#)", text)
  assert text.count("<svg ") == 4
  assert re.findall(r'src="data:image/([a-z+]+);', text) == ["jpeg"] * 2
  # It was not written over, so that an end in the middle leaves the old page.
  assert (out / "linked").read_text() == "before"
  assert re.search(r"a b\.png → [^<]+ \d+%<", text)
  with Image.open(out / "rollout" / "002_c.png") as image:
    assert image.size == (3 * 192 + 2 * 4, 192)


@pytest.mark.parametrize(
  "loss, names, text",
  [
    ("softmax", class_names.imagenet1k()[:3], "goldfish (n01443537) 75%"),
    ("regression", ("x", "y", "z"), "x 0.2, y 0.75, z 0.05"),
  ],
)
def test_a_caption_has_the_answer(loss, names, text):
  """ImageNet's classes are in words; numbers of a regression are no shares."""
  vit = vit_jax.load(TOKEN, verbose=False)
  vit = dataclasses.replace(vit, loss=loss, class_names=names, num_classes=3)
  answer = np.array([[0.2, 0.75, 0.05]], np.float32)
  vars(vit)["probabilities"] = lambda params, images: answer
  black = np.zeros((32, 32, 3), np.uint8)
  (caption,) = visualize.captions_of(["x/a.png"], vit, [black])
  assert caption == f"a.png → {text}"


@pytest.mark.nightly  # two models are compiled
def test_models_side_by_side(photos, tmp_path):
  argv = f"--beside={MAP}", f"--out={tmp_path}"
  written = call(TOKEN, photos / "c.png", *argv)
  assert {path.name for path in written} == {
    *("index.html", "rollout.png", "001_c.png"),
    *(
      f"{kind}_{name}.weights.svg"
      for kind in ("filters", "positions", "distance", "heads")
      for name in ("vit_linen_names", "bv_map")
    ),
  }


def test_published_weights_without_images(tmp_path, capsys, undrawn):
  call(MAP, f"--out={tmp_path}")
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    *("filters.svg", "index.html", "positions.svg")
  ]
  printed = capsys.readouterr().out
  for what in ("images", "Mean attention distance", "Where the model looks"):
    assert f"left out  {what}" in printed


def test_all_errors_at_once(photos, tmp_path):
  file = tmp_path / "file"
  file.write_text("no image")
  with pytest.raises(ValueError) as e:
    call(
      *(TOKEN, photos, file, tmp_path / "none.png"),
      *(f"--beside={tmp_path / 'none'}", f"--out={file}", "--patch=5,1"),
    )
  errors = str(e.value).splitlines()
  named = ("--out", f"got '{tmp_path}/none'", file, f"{tmp_path}/none.png")
  for line, text in zip(errors, (*named, "--patch: got 5,1"), strict=True):
    assert line.startswith(str(text))


def test_a_folder_of_broken_images_is_refused(tmp_path):
  folder = tmp_path / "photos"
  folder.mkdir()
  (folder / "a.png").write_text("no image")
  with pytest.raises(ValueError, match="a.png: "):
    call(TOKEN, folder, f"--out={tmp_path / 'none'}")
  assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_images_of_the_data_that_a_run_is_scored_on(
  tmp_path, capsys, monkeypatch
):
  """Spread over the whole split of 500 images, with their true classes."""
  monkeypatch.setattr(visualize, "NUM_IMAGES", 8)
  ops = "decode|resize(16)"
  config = Config(
    model=ViTConfig(**MODEL),
    data=DataConfig(dataset="digits", ops=ops),
    evals=(ClassificationConfig(split="test", ops=ops),),
  )
  metadata = of_model((4, 4), [*"0123456789"])
  metadata["preprocessing"] = {"ops": ops}
  run = write(tmp_path / "run", [], config, metadata)
  write_checkpoint(run)
  written = call(run, f"--out={tmp_path / 'out'}")
  printed = capsys.readouterr().out
  assert "images of digits, test\n" in printed
  assert f"{run}: B/4, 8 images\n" in printed
  files = [path.name for path in written if path.parent.name == "rollout"]
  assert len(files) == 8
  assert re.fullmatch(r"001_record_0__\d_\.png", files[0])
  assert re.fullmatch(r"008_record_499__\d_\.png", files[-1])

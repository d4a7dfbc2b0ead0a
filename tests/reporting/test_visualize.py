"""`vit-jax visualize`: files, page, and what it refuses."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import class_names
from vit_jax.commands import visualize as visualize_command
from vit_jax.data import sources
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


def test_published_weights_without_images(tmp_path, capsys, undrawn):
  """Side by side; each has what its model has."""
  call(MAP, f"--beside={DATA / 'bit_v2.weights.npz'}", f"--out={tmp_path}")
  assert {path.name for path in tmp_path.iterdir()} == {
    *("index.html", "filters_bv_map.weights.svg"),
    *("filters_bit_v2.weights.svg", "positions_bv_map.weights.svg"),
  }
  lines = capsys.readouterr().out.splitlines()
  left_out = " ".join(x for x in lines if x.startswith("left out"))
  for what in ("images", "Mean attention distance", "Where the model looks"):
    assert what in left_out
  assert "bit_v2.weights, R50x0.5 has no positions" in left_out
  assert "bit_v2.weights, R50x0.5 has no attention" in left_out


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
  # A folder whose images are all broken.
  folder, out = tmp_path / "photos", tmp_path / "none"
  folder.mkdir()
  (folder / "a.png").write_text("no image")
  with pytest.raises(ValueError, match="a.png: "):
    call(TOKEN, folder, f"--out={out}")
  assert not out.exists()


@pytest.mark.slow
def test_images_of_the_data_that_a_run_is_scored_on(
  run, tmp_path, capsys, monkeypatch
):
  """Spread over the whole split of 20 images, with their true classes."""
  monkeypatch.setattr(visualize, "NUM_IMAGES", 8)
  written = call(run.workdir, f"--out={tmp_path / 'out'}")
  printed = capsys.readouterr().out
  assert f"images of {run.dataset}, val\n" in printed
  assert f"{run.workdir}: Ti/8, 8 images\n" in printed
  files = [path.name for path in written if path.parent.name == "rollout"]
  assert len(files) == 8
  val = sources.open_source(run.dataset, "val")
  for file, at in ((files[0], 0), (files[-1], 19)):
    name = val.class_names[val.labels()[at]]
    assert f"_record_{at}__{name}_" in file

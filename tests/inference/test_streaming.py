"""Images that a command line names: which, in what order, how many at once."""

import io
import sys
import threading

import numpy as np
import pytest
from PIL import Image, features

from vit_jax.data import images
from vit_jax.inference import streaming
from vit_jax.inference.streaming import Named

OPS = "decode|resize(4)"


def encoded(level, kind="PNG", size=(6, 5)):
  stream = io.BytesIO()
  Image.new("RGB", size, (level,) * 3).save(stream, kind)
  return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
  for i, name in enumerate(["b.PNG", "a/2.png", "a/10.png", "c/d/e.png"]):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(encoded(i))
  (tmp_path / "notes.txt").write_text("no image")
  (tmp_path / "._b.png").write_text("what macOS leaves")
  (tmp_path / ".cache").mkdir()
  (tmp_path / ".cache" / "x.png").write_bytes(encoded(9))
  (tmp_path / "empty").mkdir()
  return tmp_path


def names(texts, relative_to=""):
  result = streaming.find(texts)
  return [n.name.removeprefix(f"{relative_to}/") for n in result]


@pytest.fixture
def pipe(monkeypatch):
  """Gives the process a standard input with these bytes."""

  def make(data):
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdin", stdin)

  return make


def test_a_folder_and_the_folders_in_it(folder):
  for name in ("@eaDir", "a/__MACOSX"):  # made by programs, with copies
    (folder / name).mkdir()
    (folder / name / "x.png").write_bytes(encoded(9))
  result = names([str(folder)], relative_to=folder)
  assert result == ["b.PNG", "a/10.png", "a/2.png", "c/d/e.png"]


def test_a_folder_lists_what_can_be_read(tmp_path):
  Image.init()
  for suffix in (".jpe", ".pgm", ".tif", ".avif", ".jp2", ".eps"):
    (tmp_path / f"x{suffix}").touch()
  result = names([str(tmp_path)], relative_to=tmp_path)
  has_avif = ["x.avif"] * features.check("avif")
  assert result == [*has_avif, "x.jpe", "x.pgm", "x.tif"]
  assert {Image.EXTENSION[s] for s in images.SUFFIXES} == {*images.FORMATS}


@pytest.mark.parametrize(
  "glob, expected",
  [
    ("**/*.png", ["a/10.png", "a/2.png", "c/d/e.png"]),
    ("[ac]", ["a/10.png", "a/2.png", "c/d/e.png"]),  # folders
    ("a/**", ["a/10.png", "a/2.png"]),  # each once
  ],
)
def test_globs(folder, glob, expected):
  assert names([f"{folder}/{glob}"], relative_to=folder) == expected


@pytest.mark.parametrize(
  "word, error",
  [
    ("{}/empty", "a folder without images"),
    ("{}/*.jpeg", "a glob that matches no file"),
    ("{}/lost.png", "a path with no file"),
    ("https://x.y/a.png", "an address"),
  ],
)
def test_what_is_not_there_takes_the_place_of_an_image(folder, word, error):
  name = word.format(folder)
  result = streaming.find([name, f"{folder}/b.PNG"])
  first, second = streaming.read_all(result, OPS, ahead=2)
  assert first.name == name and first.pixels is None
  assert str(first.error).startswith(f"got {error}")
  assert second.error is None


def test_a_list_on_standard_input(folder, pipe):
  lines = f"{folder}/a\n\n{folder}/*.PNG\r\n{folder}/c/d/e.png"
  pipe(lines.encode())
  result = names(["-"], folder)
  assert result == ["a/10.png", "a/2.png", "b.PNG", "c/d/e.png"]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_an_image_on_standard_input(kind, pipe):
  data = encoded(100, kind)
  pipe(data)
  (named,) = streaming.find(["-"])
  assert named == ("-", data)
  assert abs(int(images.read(named.image).mean()) - 100) <= 1
  pipe(b"\n")
  (named,) = streaming.find(["-"])
  assert "got nothing" in str(named.image)


def test_order_and_bound():
  """Slow images do not let later ones pass, nor pile up."""
  ahead, drawn = 3, 0

  def images_to_come():
    nonlocal drawn
    for i in range(20):
      drawn += 1
      side = 900 if i % 5 == 0 else 4
      yield Named(str(i), encoded(i, size=(side, side)))

  for i, row in enumerate(
    streaming.read_all(images_to_come(), OPS, ahead=ahead)
  ):
    assert row.name == str(i)
    np.testing.assert_array_equal(row.pixels, np.full((4, 4, 3), i))
    assert drawn <= i + 1 + ahead


def test_threads_end_with_the_iterator():
  before = threading.active_count()
  rows = streaming.read_all(
    (Named("x", encoded(0)) for _ in range(10**9)), OPS, ahead=4
  )
  next(rows)
  assert threading.active_count() > before
  rows.close()
  for thread in threading.enumerate():
    if thread.name.startswith("read_"):
      thread.join(5)
  assert threading.active_count() == before

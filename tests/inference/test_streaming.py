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
  """Four images; a text, a folder without any, and copies by programs."""
  for i, name in enumerate(
    ["b.PNG", "a/2.png", "a/10.png", "c/d/e.png"]
    + ["._b.png", ".cache/x.png", "@eaDir/x.png", "a/__MACOSX/x.png"]
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(encoded(i))
  (tmp_path / "notes.txt").write_text("no image")
  (tmp_path / "empty").mkdir()
  return tmp_path


@pytest.fixture
def pipe(monkeypatch):
  """Gives the process a standard input with these bytes."""

  def make(data):
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdin", stdin)

  return make


A, B, C = ["a/10.png", "a/2.png"], ["b.PNG"], ["c/d/e.png"]


@pytest.mark.parametrize(
  "word, expected",
  [
    ("{}", B + A + C),
    ("{}/**/*0.png", A[:1]),
    ("{}/[ac]", A + C),  # folders
    ("{}/c/**", C),  # each once
    ("-", A + B + C),
  ],
)
def test_which_images_and_in_what_order(folder, pipe, word, expected):
  """A folder has those in its folders; `-` is a list on standard input."""
  pipe(f"{folder}/a\n\n{folder}/*.PNG\r\n{folder}/c/d/e.png".encode())
  found = streaming.find([word.format(folder)])
  assert [n.name.removeprefix(f"{folder}/") for n in found] == expected


def test_a_folder_lists_what_can_be_read(tmp_path):
  Image.init()
  for suffix in (".jpe", ".pgm", ".tif", ".avif", ".jp2", ".eps"):
    (tmp_path / f"x{suffix}").touch()
  result = [n.name for n in streaming.find([str(tmp_path)])]
  has_avif = ["x.avif"] * features.check("avif")
  listed = [*has_avif, "x.jpe", "x.pgm", "x.tif"]
  assert result == [f"{tmp_path}/{name}" for name in listed]
  assert {Image.EXTENSION[s] for s in images.SUFFIXES} == {*images.FORMATS}


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


def test_an_image_on_standard_input(pipe):
  data = encoded(100, "TIFF")
  pipe(data)
  (named,) = streaming.find(["-"])
  assert named == ("-", data)
  assert abs(int(images.read(named.image).mean()) - 100) <= 1
  pipe(b"\n")
  (named,) = streaming.find(["-"])
  assert "got nothing" in str(named.image)


def test_order_and_bound_and_the_end_of_threads():
  """Slow images do not let later ones pass, nor pile up."""
  ahead, drawn, before = 3, 0, threading.active_count()

  def images_to_come():
    nonlocal drawn
    while True:
      side = 900 if drawn % 5 == 0 else 4
      yield Named(str(drawn), encoded(drawn, size=(side, side)))
      drawn += 1

  rows = streaming.read_all(images_to_come(), OPS, ahead=ahead)
  for i in range(20):
    row = next(rows)
    assert row.name == str(i)
    np.testing.assert_array_equal(row.pixels, np.full((4, 4, 3), i))
    assert drawn <= i + 1 + ahead
  assert threading.active_count() > before
  rows.close()
  for thread in threading.enumerate():
    if thread.name.startswith("read_"):
      thread.join(5)
  assert threading.active_count() == before

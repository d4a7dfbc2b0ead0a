"""Tables, JSON lines and CSV of classes; the names of pictures."""

import io
import json
import os
import pathlib

import pytest
from tqdm.utils import disp_len

from vit_jax.inference import output_formats
from vit_jax.inference.pretrained import Answer, Prediction

CAT = Answer(
  "photos/猫.jpg",
  [Prediction("tabby", 0.75, 3), Prediction('a "big" cat, wild', 0.25, 0)],
)
DOG = Answer("dog.png", [Prediction("hound", 1.0, 1)])


class Terminal(io.StringIO):
  def isatty(self):
    return True


def written(make, out=None, result=(CAT, DOG), picture=None):
  out = io.StringIO() if out is None else out
  write = make(out)
  for answer in result:
    write(answer, picture)
  return out.getvalue()


def table(names=("photos/猫.jpg", "dog.png")):
  classes = ["tabby", "hound", 'a "big" cat, wild']
  return lambda out: output_formats.as_table(out, names, classes)


def test_the_formats():
  """Wide characters and quotes, in each."""
  assert written(table()) == (
    "image           prob.  class\n"
    "photos/猫.jpg   75.0%  tabby\n"
    '                25.0%  a "big" cat, wild\n'
    "dog.png        100.0%  hound\n"
  )
  picture = pathlib.Path("attention/cat.png")
  text = written(output_formats.as_json, result=[CAT], picture=picture)
  assert json.loads(text) == {
    "image": "photos/猫.jpg",
    "predictions": [
      {"class": "tabby", "index": 3, "probability": 0.75},
      {"class": 'a "big" cat, wild', "index": 0, "probability": 0.25},
    ],
    "attention": "attention/cat.png",
  }
  as_csv = lambda out: output_formats.as_csv(out, with_pictures=False)
  assert written(as_csv).splitlines() == [
    "image,rank,class,index,probability",
    "photos/猫.jpg,1,tabby,3,0.750000",
    'photos/猫.jpg,2,"a ""big"" cat, wild",0,0.250000',
    "dog.png,1,hound,1,1.000000",
  ]


@pytest.mark.parametrize("columns", [30, 120])
def test_a_table_fits_its_terminal(monkeypatch, columns):
  monkeypatch.setenv("COLUMNS", str(columns))
  long = Answer("深い/" * 20 + "cat.jpg", CAT.classes * 2)
  text = written(table([long.name]), Terminal(), [long, DOG])
  lines = text.splitlines()
  assert max(map(disp_len, lines)) <= columns
  assert "at.jpg " in lines[1] and "…" in lines[1]
  at = {line.index("%") + disp_len(line) - len(line) for line in lines[1:]}
  assert len(at) == 1


def test_a_terminal_gets_no_control_characters():
  bad = Answer("a\x1b]0;x\x07\n.jpg", [Prediction("b\x1b[2J", 1.0, 0)])
  text = written(table([bad.name]), Terminal(), [bad])
  assert "\x1b" not in text and "\x07" not in text
  assert len(text.splitlines()) == 2


def test_each_picture_has_a_name():
  names = output_formats.FileNames("out")
  images = ["x/a.jpg", "y/a.png", "a_2.png", "a.gif", "-", "b.c.png"]
  result = [str(names.of(image)) for image in images]
  expected = ["a", "a_2", "a_2_2", "a_3", "image", "b.c"]
  assert result == [os.path.join("out", f"{name}.png") for name in expected]

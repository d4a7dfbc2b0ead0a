"""docs/troubleshooting.md quotes what is printed.

A message that is cheap to provoke is provoked, and its text compared. Of the
others every piece between `...` must be a text of the source.
"""

import ast
import pathlib
import re

import numpy as np
import pytest

import vit_jax
from vit_jax import experiment
from vit_jax.config import MeshConfig, defaults, freeze
from vit_jax.data.sources import open_source
from vit_jax.sharding import mesh_shape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [  # lines are broken in the page, anywhere between two words
  " ".join(m.split())
  for m in re.findall(r"^```text\n(.*?)^```$", TEXT, re.M | re.S)
]
FILE = str(ROOT / "tests/data/vit_token.weights.npz")


def run(**changes):
  """Checks a run on fake records of ImageNet; `data__ops` is data.ops."""
  c = defaults()
  c.fake_data = True
  c.model.variant, c.model.depth = "Ti/16", 2
  c.data.batch_size, c.total_steps = 64, 100
  for path, value in changes.items():
    *parents, name = path.split("__")
    node = c
    for parent in parents:
      node = node[parent]
    node[name] = value
  experiment.setup(freeze(c))


def without_fewshot(folder):
  c = defaults()
  c.model.variant, c.model.depth = "Ti/16", 2
  c.data.dataset, c.data.data_dir = "digits", str(folder)
  c.data.batch_size, c.total_steps = 64, 10
  c.evals = {"few": {"kind": "fewshot", "dataset": "dtd"}}
  experiment.setup(freeze(c))


def one_class(folder):
  (folder / "cat").mkdir()
  open_source(f"folder:{folder}", "train")


def not_weights(folder):
  (folder / "B_16.npz").write_text("<html>")
  vit_jax.load(folder / "B_16.npz")


def apply(shape, dtype):
  vit_jax.load(FILE, verbose=False)(np.zeros(shape, dtype))


# Beginning of a message -> what provokes it, given an empty folder.
PROVOKED = {
  "2 faults in the configuration": lambda _: freeze(
    {"optim": {"lrr": 1, "lr": "fast"}}
  ),
  "got data set 'cifar10'": lambda d: open_source("cifar10", "train", str(d)),
  "config.fewshot": without_fewshot,
  "got data set 'cifar11'": lambda d: open_source("cifar11", "train", str(d)),
  "got data set 'folder": one_class,
  "config.data.ops: got 'decode|": lambda _: run(
    data__ops="decode|resize_small(256)"
  ),
  "config.data.ops: got images": lambda _: run(
    data__ops="decode_inception_crop(225)"
  ),
  "config.init": lambda _: run(init=FILE),
  "The model that fits them": lambda _: run(init=FILE),
  "got 'B/16'": lambda _: vit_jax.load("B/16"),
  "got ..., which is neither": not_weights,
  "config.num_classes": lambda _: run(num_classes=10),
  "got images of shape": lambda _: apply((1, 48, 48, 3), np.float32),
  "got images of type": lambda _: apply((1, 32, 32, 3), np.uint8),
  "config.data.batch_size: got 100": lambda _: run(data__batch_size=100),
  "config.mesh": lambda _: mesh_shape(MeshConfig(data=3), 8),
  "config.optim.warmup_steps": lambda _: run(optim__warmup_steps=500),
}


def pieces(message):
  """Returns what is between the parts that differ."""
  return [p for p in re.split(r"\.\.\.", message) if p]


def cause(message):
  return next((f for k, f in PROVOKED.items() if message.startswith(k)), None)


@pytest.mark.parametrize(
  "message", [m for m in MESSAGES if cause(m)], ids=lambda m: m[:40]
)
def test_it_is_printed(message, tmp_path):
  with pytest.raises((ValueError, FloatingPointError)) as raised:
    cause(message)(tmp_path)
  text = " ".join(str(raised.value).split())
  pattern = ".*?".join(re.escape(p) for p in re.split(r"\s*\.\.\.\s*", message))
  pattern = pattern.replace(".*?", r"\s*.*?\s*")
  assert re.search(pattern, text), text


def texts():
  """Returns the texts of the source, `\\0` where something is put in."""
  found = []
  for path in (ROOT / "vit_jax").rglob("*.py"):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
      if isinstance(node, ast.JoinedStr):
        parts = [getattr(v, "value", "") for v in node.values]
        found.append("\0".join(p for p in parts if isinstance(p, str)))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(node.value.replace("{:.0%}", "\0"))
  return "\n".join(" ".join(text.split()) for text in found)


def test_the_others_are_in_the_source():
  source, others = texts(), [m for m in MESSAGES if not cause(m)]
  assert len(others) > 7
  for message in others:
    for piece in pieces(message):
      # A text that is put into another one, such as advice, ends in a stop.
      for part in re.split(r"; (?=see )", piece.strip(" .()")):
        assert part in source, part


def test_most_are_provoked():
  assert len(MESSAGES) == len(set(MESSAGES)) > 25
  assert len([m for m in MESSAGES if cause(m)]) == len(PROVOKED)
  for message in MESSAGES:
    assert max(map(len, pieces(message))) > 20, message


def test_what_it_names_is_there():
  for path in re.findall(r"`((?:docs|configs|vit_jax)/[\w/]+\.\w+)`", TEXT):
    assert (ROOT / path).exists(), path
  for path in re.findall(r"`(requirements\S*\.txt)`", TEXT):
    assert (ROOT / path).exists(), path

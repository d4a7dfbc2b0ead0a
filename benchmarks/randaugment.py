"""Draws RandAugment's operations: `python benchmarks/randaugment.py`.

Writes docs/randaugment.png: scikit-learn's china.jpg at 224 px, with a row per
operation and a column per magnitude of AugReg (10, 15, 20). Signs are positive;
the centre of cutout is at a third of the height and of the width.
"""

import pathlib
import sys

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
from vit_jax.data.operations import CentralCrop, ResizeSmall
from vit_jax.data.randaugment import DISTORTIONS, Draw
from vit_jax.data.tf_cpu import tf

FILE = pathlib.Path(__file__).parents[1] / "docs" / "randaugment.png"
MAGNITUDES = (10, 15, 20)
SIDE, TEXT = 112, 14  # pixels of a picture, and of the line above it


def sheet() -> Image.Image:
  """Returns the pictures, four operations beside each other."""
  photo = ResizeSmall(256).tensorflow(load_sample_image("china.jpg"), None)
  photo = CentralCrop(224).tensorflow(photo, None)
  draw = Draw(tf.constant(0), tf.constant(1 / 3), tf.constant(1 / 3))
  columns, rows = 4, len(DISTORTIONS) // 4
  width = len(MAGNITUDES) * SIDE + 8
  image = Image.new("RGB", (columns * width - 8, rows * (SIDE + TEXT)), "white")
  for i, (name, fn) in enumerate(DISTORTIONS.items()):
    left, top = i % columns * width, i // columns * (SIDE + TEXT)
    label = f"{name} {', '.join(map(str, MAGNITUDES))}"
    ImageDraw.Draw(image).text((left, top + 1), label, "black")
    for j, magnitude in enumerate(MAGNITUDES):
      picture = Image.fromarray(np.asarray(fn(photo, magnitude, draw)))
      picture = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
      image.paste(picture, (left + j * SIDE, top + TEXT))
  return image


if __name__ == "__main__":
  sheet().quantize(128).save(FILE, optimize=True)

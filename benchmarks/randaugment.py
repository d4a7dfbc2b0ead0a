"""Draws RandAugment's operations: `python benchmarks/randaugment.py`.

Writes docs/randaugment.png: scikit-learn's china.jpg at 224 px, by each
operation at the magnitudes of AugReg (10, 15, 20). Signs are positive; the
centre of cutout is at a third of the height and of the width. At 15 and 20,
translations leave little of the image.
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
SIDE, TEXT, GAP = 112, 18, 4  # pixels: a picture, the line above, between


def sheet() -> Image.Image:
  """Returns the pictures, four operations beside each other."""
  photo = ResizeSmall(256).tensorflow(load_sample_image("china.jpg"), None)
  photo = CentralCrop(224).tensorflow(photo, None)
  draw = Draw(tf.constant(0), tf.constant(1 / 3), tf.constant(1 / 3))
  columns, rows = 3, -(-len(DISTORTIONS) // 3)
  step, height = SIDE + GAP, SIDE + TEXT + GAP
  width = len(MAGNITUDES) * step + 2 * GAP
  image = Image.new("RGB", (columns * width, rows * height), "white")
  for i, (name, fn) in enumerate(DISTORTIONS.items()):
    left, top = i % columns * width + GAP, i // columns * height
    for j, magnitude in enumerate(MAGNITUDES):
      corner = left + j * step, top + TEXT
      label = f"{name} {magnitude}"
      ImageDraw.Draw(image).text((corner[0], top + 3), label, "black")
      picture = Image.fromarray(np.asarray(fn(photo, magnitude, draw)))
      picture = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
      image.paste(picture, corner)
  return image


if __name__ == "__main__":
  sheet().quantize(128).save(FILE, optimize=True)

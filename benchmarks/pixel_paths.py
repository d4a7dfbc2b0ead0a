"""Differences between the pixels of preprocessings.

Run: python benchmarks/pixel_paths.py
The images are scikit-learn's two photographs, cut to 375 x 499 pixels and saved
as JPEG with colours of half the resolution. The reference is timm's evaluation
at 224 pixels with a crop of 0.9. For each replaced step, prints the mean and
the largest difference in levels of 255, and the share of different values. Then
prints, for the whole first photograph, the sides for a shorter side of 248.
"""

import dataclasses
import io
import pathlib
import sys

import numpy as np
from PIL import Image
from sklearn import datasets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
from vit_jax.data import ops
from vit_jax.data.tf_cpu import tf
from vit_jax.weights import eval_preprocessing

PHOTOS = pathlib.Path(datasets.__file__).parent / "images"


def evaluated(data: bytes, text: str) -> np.ndarray:
  """Returns the pixels that evaluators get."""
  image = ops.apply(tf.constant(data), text, tf.zeros([2], tf.int64))
  return image.numpy().astype(int)


def difference(data: bytes, one: str, other: str) -> str:
  """Returns mean, largest and share of differences as text."""
  difference = np.abs(evaluated(data, one) - evaluated(data, other))
  share = 100 * (difference > 0).mean()
  return f"{difference.mean():.2f}, {difference.max()}, {share:.0f} %"


def main() -> None:
  """Prints the tables."""
  base = eval_preprocessing.timm((224, 224), 0.9)
  tensorflow = dataclasses.replace(base, resizer="tensorflow")
  paths = {
    "fast transform": dataclasses.replace(base, dct="fast"),
    "colours repeated": dataclasses.replace(base, upsampling="plain"),
    "TensorFlow, antialiased": tensorflow,
    "TensorFlow": dataclasses.replace(tensorflow, antialias=False),
    "bilinear": dataclasses.replace(base, filter="bilinear"),
  }
  whole, photos = {}, {}
  for name in ("china", "flower"):
    whole[name] = (PHOTOS / f"{name}.jpg").read_bytes()
    with Image.open(io.BytesIO(whole[name])) as image:
      stream = io.BytesIO()
      image.crop((0, 0, 499, 375)).save(stream, "JPEG", quality=90)
      photos[name] = stream.getvalue()
  print(f"{'':<24}", *(f"{name:<18}" for name in photos))
  for key, path in paths.items():
    cells = [difference(d, base.ops, path.ops) for d in photos.values()]
    print(f"{key:<24}", *(f"{cell:<18}" for cell in cells))
  china = whole["china"]
  for path in (base, tensorflow):
    resized = path.ops.split("|central")[0] + "|pad(0)"
    height, width, _ = evaluated(china, resized).shape
    print(f"{path.resizer:<24} {height} x {width}")
  print(f"{'difference':<24} {difference(china, base.ops, tensorflow.ops)}")


if __name__ == "__main__":
  main()

"""A small data set of images with two splits, and forms in which it is read."""

import io
import tarfile

import numpy as np
from PIL import Image

from vit_jax.data import sources

NAMES = ("ant", "bee", "cat")


def encoded(number, form="jpeg", size=(10, 8), **options):
  """An image that no other number has."""
  pixels = np.random.default_rng(number).integers(
    256, size=(*size[::-1], 3), dtype=np.uint8
  )
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, form, **options)
  return file.getvalue()


def images(start, count):
  """[(encoded, class)], of JPEG and PNG in turn."""
  return [
    (encoded(i, ("jpeg", "png")[i % 2]), NAMES[i * 7 % 3])
    for i in range(start, start + count)
  ]


SPLITS = {"train": images(0, 12), "validation": images(100, 5)}


def tar_of(members, mode="w"):
  """The bytes of a tar of pairs of a name and its bytes."""
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode=mode) as tar:
    for name, data in members:
      member = tarfile.TarInfo(name)
      member.size = len(data)
      tar.addfile(member, io.BytesIO(data))
  return file.getvalue()


def write_folder(root):
  for split, records in SPLITS.items():
    for i, (image, name) in enumerate(records):
      form = "png" if image.startswith(b"\x89PNG") else "jpg"
      path = root / split / name / f"{i}.{form}"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(image)
  return f"folder:{root}"


def stored(name, split, data_dir):
  """{encoded image: name of its class}"""
  source = sources.open_source(name, split, str(data_dir))
  records = source.records().as_numpy_iterator()
  return {r["image"]: source.class_names[r["label"]] for r in records}

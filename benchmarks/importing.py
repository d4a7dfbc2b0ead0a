"""Times an import per image, and a record outside a streamed subset.

Run: python benchmarks/importing.py
Times are processor seconds of all threads, which other programs disturb little.
"""

import io
import pathlib
import sys
import tarfile
import tempfile
import time

import numpy as np
from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
from vit_jax.data import download_and_prepare, subsets, tfds_records
from vit_jax.data.builders.image_builder import Entry, checked
from vit_jax.data.tf_cpu import tf

NUM_IMAGES, NUM_CLASSES = 4000, 10


def pictures(count: int = 20) -> list[bytes]:
  """JPEGs of 500 x 375 pixels and about 80 kB: noise over waves."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
  made = []
  for i in range(count):
    shifted = Image.fromarray(np.roll(coarse, i, 1))
    pixels = np.asarray(shifted.resize((500, 375), Image.Resampling.BICUBIC))
    pixels = pixels + rng.normal(0, 14, pixels.shape)
    file = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.save(file, "jpeg", quality=85)
    made.append(file.getvalue())
  return made


def main() -> None:
  """Measures and prints."""
  images = pictures()
  print(f"images of {np.mean([len(i) for i in images]):,.0f} bytes")
  start = time.process_time()
  for i in range(200):
    checked(Entry("", images[i % len(images)], 0))
  print(
    f"check       {(time.process_time() - start) / 200 * 1e3:.2f} ms an image"
  )
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    for label in range(NUM_CLASSES):
      with tarfile.open(folder / f"n{label:08}.tar", "w") as tar:
        for i in range(NUM_IMAGES // NUM_CLASSES):
          image = images[i % len(images)]
          member = tarfile.TarInfo(f"{i}.JPEG")
          member.size = len(image)
          tar.addfile(member, io.BytesIO(image))
    start = time.process_time()
    download_and_prepare.prepare(
      "imagenet21k", str(folder / "tfds"), str(folder)
    )
    spent = time.process_time() - start
    print(f"import      {spent / NUM_IMAGES * 1e3:.2f} ms an image")
    file = str(folder / "records")
    with tf.io.TFRecordWriter(file) as writer:
      for i in range(NUM_IMAGES):
        writer.write(_example(images[i % len(images)], i % NUM_CLASSES))
    print(f"dropped     {_dropped(file) * 1e3:.2f} ms a record")


def _example(image: bytes, label: int) -> bytes:
  features = {
    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
  }
  features = tf.train.Features(feature=features)
  return tf.train.Example(features=features).SerializeToString()


def _dropped(file: str) -> float:
  """Returns the seconds per record of a subset of one in a hundred."""
  whole = tfds_records.TfdsStream(
    name="records",
    split="all",
    num_examples=NUM_IMAGES,
    num_classes=NUM_CLASSES,
    pieces=(tfds_records.Piece(file, 0, NUM_IMAGES),),
  )
  indices = subsets.members(NUM_IMAGES, NUM_IMAGES // 100, 0)
  drawn = subsets.Subset.of(whole, indices, "all@1%")
  for _ in range(2):  # The first pass also traces.
    start = time.process_time()
    assert sum(1 for _ in drawn.raw(0, drawn.num_examples)) == len(indices)
    spent = time.process_time() - start
  return spent / NUM_IMAGES


if __name__ == "__main__":
  main()

"""Images per second from JPEGs to batches: `python benchmarks/input.py`.

The JPEGs have the size of ImageNet's (500 x 375, about 60 kB) and are cut from
scikit-learn's two photographs. They are in memory, so the disk is not measured.
They pass through `train_batches`, as in training. All variants take turns in
one process, on one core and on all cores. The table has medians over the
rounds: images per second on the clock; images per second of processor time
(which other programs disturb less); and the ratio of the latter to big_vision's
fused operations (with or without RandAugment) in the same round. The results
are in benchmarks/notes/performance_log.md.
"""

import os
import pathlib
import sys

CORES = sorted(os.sched_getaffinity(0))
if __name__ == "__main__" and len(sys.argv) > 1:  # before TensorFlow starts
  os.sched_setaffinity(0, CORES[: int(sys.argv[1])])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# ruff: noqa: E402
import dataclasses
import io
import random
import statistics
import subprocess
import time
from unittest import mock

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

for folder in pathlib.Path(__file__).resolve().parents[:2]:
  sys.path.insert(0, str(folder))

import input_peer

from vit_jax.data import tf_pixels
from vit_jax.data.operations import OPERATIONS
from vit_jax.data.pipeline import train_batches
from vit_jax.data.source import Source
from vit_jax.data.tf_cpu import tf

BATCH = 32
ROUNDS = 7
BATCHES = 48  # batches of a round that are timed
SKIPPED = 16  # before them: decoded while another variant was timed, or while
# the one before still filled its buffers


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Jpegs(Source):
  """Encoded images in memory."""

  images: tf.Tensor

  def load(self, raw):
    index = raw["index"]
    return {
      "image": self.images[index],
      "label": tf.constant(0),
      "index": index,
    }

  def labels(self):
    return np.zeros(self.num_examples, np.int32)


def photographs(count: int) -> list[bytes]:
  """Returns JPEGs, each a different part of one of two photographs."""
  rng = np.random.default_rng(0)
  photos = load_sample_images().images
  encoded = []
  for i in range(count):
    photo = photos[i % len(photos)]
    y, x = (rng.integers(0, n + 1) for n in (427 - 375, 640 - 500))
    file = io.BytesIO()
    Image.fromarray(photo[y : y + 375, x : x + 500]).save(
      file, "JPEG", quality=91
    )
    encoded.append(file.getvalue())
  return encoded


def source(count: int = 256) -> Jpegs:
  return Jpegs(
    name="photographs",
    split="train",
    num_examples=count,
    num_classes=1,
    images=tf.constant(photographs(count)),
  )


def decode_roughly(image, key, size):
  """`decode_inception_crop` with the decoder's faster, less exact options."""
  shape = tf.image.extract_jpeg_shape(image)
  crop = tf.image.decode_and_crop_jpeg(
    image,
    tf.concat(tf_pixels.inception_box(shape, key, 5, 100), 0),
    channels=3,
    dct_method="INTEGER_FAST",
    fancy_upscaling=False,
  )
  return tf_pixels.resize(crop, size, "bilinear", False)


def decode_unseen(image, key):
  """`decode` without a look at the header."""
  image = tf.io.decode_image(image, channels=3, expand_animations=False)
  return tf.ensure_shape(image, [None, None, 3])


def crop_unseen(image, key, size):
  """`decode_inception_crop` without a look at the header."""

  def crop_jpeg():
    shape = tf.image.extract_jpeg_shape(image)
    window = tf.concat(tf_pixels.inception_box(shape, key, 5, 100), 0)
    return tf.image.decode_and_crop_jpeg(image, window, channels=3)

  def crop_other():
    whole = decode_unseen(image, key)
    return tf_pixels.crop(
      whole, *tf_pixels.inception_box(tf.shape(whole), key, 5, 100)
    )

  crop = tf.cond(tf.io.is_jpeg(image), crop_jpeg, crop_other)
  crop = tf.ensure_shape(crop, [None, None, 3])
  return tf_pixels.resize(crop, size, "bilinear", False)


def decode_alone(image, key, size):
  """The part of `decode_inception_crop` that no faster pixels can avoid."""
  with mock.patch.object(tf_pixels, "resize", lambda crop, *options: crop):
    crop = FUSED_CROP(size).tensorflow(image, key)
  with tf.control_dependencies([crop]):
    return tf.zeros([size, size, 3], tf.uint8)


FUSED_CROP = OPERATIONS["decode_inception_crop"]
APART = "decode|inception_crop(224)|flip_lr"
FUSED = "decode_inception_crop(224)|flip_lr"
VARIANTS = {  # name -> operations, and what replaces some of them
  "decode, then crop": (APART, {}),
  "fused": (FUSED, {}),
  "decode, then crop; header unseen": (APART, {"decode": decode_unseen}),
  "fused, header unseen": (FUSED, {"decode_inception_crop": crop_unseen}),
  "decoding of the crop alone": (
    "decode_inception_crop(224)",
    {"decode_inception_crop": decode_alone},
  ),
  "fused, no flip": ("decode_inception_crop(224)", {}),
  "fused, rough decoding": (FUSED, {"decode_inception_crop": decode_roughly}),
  "fused, randaug(2, 15)": (f"{FUSED}|randaug(2, 15)", {}),
}
PEER, PEER_DISTORTED = "big_vision's, fused", "big_vision's, randaug(2, 15)"
PEERS = {
  "big_vision's, decode, then crop": input_peer.image_of(fused=False),
  PEER: input_peer.image_of(fused=True),
  PEER_DISTORTED: input_peer.image_of(True, (2, 15)),
}


def with_pixels(name: str, fn):
  """Returns an operation whose pixels are those of a function."""

  class Replaced(OPERATIONS[name]):
    def tensorflow(self, image, key):
      size = [self.size] if hasattr(self, "size") else []
      return fn(image, key, *size)

  return Replaced


def batches(images: Jpegs, variant: str):
  """Returns the endless iterator of a variant, its first batch taken."""
  if variant in PEERS:
    data = tf.data.Dataset.from_tensor_slices(images.images)
    data = data.repeat().map(PEERS[variant], tf.data.AUTOTUNE)
    options = tf.data.Options()
    # As in our pipeline: no more threads than this process has cores.
    options.threading.private_threadpool_size = len(os.sched_getaffinity(0))
    options.threading.max_intra_op_parallelism = 1
    data = data.batch(BATCH, drop_remainder=True).with_options(options)
    iterator = data.prefetch(2).as_numpy_iterator()
    next(iterator)
    return iterator
  text, replaced = VARIANTS[variant]
  replaced = {name: with_pixels(name, fn) for name, fn in replaced.items()}
  with mock.patch.dict(OPERATIONS, replaced):
    iterator = train_batches(images, text, batch_size=BATCH, seed=0)
    next(iterator)  # builds the graph
  return iterator


def measure() -> None:
  """Prints a table for the cores that this process may use."""
  images = source()
  names = [*VARIANTS, *PEERS]
  iterators = {name: batches(images, name) for name in names}
  clock, busy = ({name: [] for name in names} for _ in range(2))
  for _ in range(ROUNDS):
    # Which one comes first is no advantage then.
    for name, iterator in random.sample([*iterators.items()], len(iterators)):
      for _ in range(SKIPPED):
        next(iterator)
      start, start_busy = time.perf_counter(), time.process_time()
      for _ in range(BATCHES):
        next(iterator)
      count = BATCHES * BATCH
      clock[name].append(count / (time.perf_counter() - start))
      busy[name].append(count / (time.process_time() - start_busy))
  print(f"cores: {len(os.sched_getaffinity(0))}; load {os.getloadavg()[0]:.1f}")
  print(f"{'':36}  images/s  per busy core  ratio")
  for name in names:
    peer = PEER_DISTORTED if "randaug" in name else PEER
    pairs = zip(busy[name], busy[peer], strict=True)
    print(
      f"{name:36}  {statistics.median(clock[name]):8,.0f}"
      f"  {statistics.median(busy[name]):13,.0f}"
      f"  {statistics.median(a / b for a, b in pairs):5.2f}"
    )


if __name__ == "__main__":
  if len(sys.argv) > 1:
    measure()
  else:
    sizes = [len(jpeg) for jpeg in photographs(16)]
    print(f"JPEGs of 500 x 375, {np.mean(sizes) / 1000:.0f} kB in the mean")
    for cores in dict.fromkeys((1, len(CORES))):
      subprocess.run([sys.executable, __file__, str(cores)], check=True)

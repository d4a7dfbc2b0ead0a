"""Images per second from JPEGs to batches: `python benchmarks/input.py`.

The JPEGs have the size of ImageNet's (500 x 375, about 60 kB) and are cut from
scikit-learn's two photographs. They are in memory, so the disk is not measured.
They pass through `train_batches`, as in training. All variants take turns in
one process, on one core and on all cores. The table has medians over the
rounds: images per second on the clock, and images per second of processor time,
which other programs disturb less. The results are in
benchmarks/notes/performance_log.md.
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

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

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


VARIANTS = {
  "decode, then crop": "decode|inception_crop(224)|flip_lr",
  "fused": "decode_inception_crop(224)|flip_lr",
  "fused, randaug(2, 15)": (
    "decode_inception_crop(224)|flip_lr|randaug(2, 15)"
  ),
}


def measure() -> None:
  """Prints a table for the cores that this process may use."""
  images = source()
  iterators = {}
  for name, ops in VARIANTS.items():
    iterators[name] = train_batches(images, ops, batch_size=BATCH, seed=0)
    next(iterators[name])  # builds the graph
  clock, busy = ({name: [] for name in VARIANTS} for _ in range(2))
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
  print(f"{'':24}  images/s  per busy core")
  for name in VARIANTS:
    print(
      f"{name:24}  {statistics.median(clock[name]):8,.0f}"
      f"  {statistics.median(busy[name]):13,.0f}"
    )


if __name__ == "__main__":
  if len(sys.argv) > 1:
    measure()
  else:
    sizes = [len(jpeg) for jpeg in photographs(16)]
    print(f"JPEGs of 500 x 375, {np.mean(sizes) / 1000:.0f} kB in the mean")
    for cores in dict.fromkeys((1, len(CORES))):
      subprocess.run([sys.executable, __file__, str(cores)], check=True)

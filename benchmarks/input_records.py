"""Random access and streamed records: `python benchmarks/input_records.py`.

Writes 2,000,000 small JPEGs (16 x 16 pixels) to 256 files of each format, 2.5
GB in all, in a given or a new folder. Then `train_batches` reads 400 batches of
256 images in turns, each in its own process, from files in the page cache. Such
images cost little to decode, so that reading is measured: seconds until the
first batch, images/s of processor time and on the clock after 100 batches, and
the memory of the process. The results are in
benchmarks/notes/performance_log.md.

Arguments: records (2,000,000), and the folder.
"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
import io

import numpy as np
from array_record.python import array_record_module
from PIL import Image

from vit_jax.data.pipeline import train_batches
from vit_jax.data.tf_cpu import tf
from vit_jax.data.tfds_records import Piece, TfdsByNumber, TfdsStream

FILES = 256
BATCH, SKIPPED, TIMED = 256, 100, 300
ROUNDS = 3
KINDS = {"by number": TfdsByNumber, "streamed": TfdsStream}


def file(folder: pathlib.Path, kind: str, number: int) -> str:
  return str(folder / f"{kind.replace(' ', '_')}-{number:05}")


def example(number: int) -> bytes:
  """Returns a record of TFDS: the number's colours, and its last digits."""
  colours = np.random.default_rng(number).integers(0, 256, (1, 3, 3), np.uint8)
  encoded = io.BytesIO()
  Image.fromarray(colours).resize((16, 16)).save(encoded, "JPEG")
  image = tf.train.BytesList(value=[encoded.getvalue()])
  label = tf.train.Int64List(value=[number % 1000])
  features = {
    "image": tf.train.Feature(bytes_list=image),
    "label": tf.train.Feature(int64_list=label),
  }
  features = tf.train.Features(feature=features)
  return tf.train.Example(features=features).SerializeToString()


def write(folder: pathlib.Path, count: int) -> None:
  """Writes the files, of 1,000 different records, unless there are some."""
  folder.mkdir(parents=True, exist_ok=True)
  if any(folder.iterdir()):
    return
  records = [example(i) for i in range(1000)]
  for i in range(FILES):
    numbers = range(i * count // FILES, (i + 1) * count // FILES)
    # As TFDS writes them: a record a chunk.
    writer = array_record_module.ArrayRecordWriter(
      file(folder, "by number", i), "group_size:1"
    )
    with tf.io.TFRecordWriter(file(folder, "streamed", i)) as stream:
      for number in numbers:
        writer.write(records[number % 1000])
        stream.write(records[number % 1000])
    writer.close()


def measure(folder: pathlib.Path, kind: str, count: int) -> None:
  """Prints a line for a format."""
  pieces = [
    Piece(
      file(folder, kind, i), 0, (i + 1) * count // FILES - i * count // FILES
    )
    for i in range(FILES)
  ]
  start = time.perf_counter()
  source = KINDS[kind](
    name="records",
    split="train",
    num_examples=count,
    num_classes=1000,
    pieces=tuple(pieces),
  )
  batches = train_batches(source, "decode|resize(16)", batch_size=BATCH, seed=0)
  next(batches)
  first = time.perf_counter() - start
  for _ in range(SKIPPED):
    next(batches)
  start, busy = time.perf_counter(), time.process_time()
  for _ in range(TIMED):
    next(batches)
  rate = TIMED * BATCH / (time.perf_counter() - start)
  per_core = TIMED * BATCH / (time.process_time() - busy)
  memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    f"{kind:9}  first batch {first:5.2f} s  {per_core:7,.0f} images/s of a core"
    f"  {rate:7,.0f} on the clock  {memory:.2f} GiB",
    flush=True,
  )


def main(argv: list[str]) -> None:
  """Writes the files, and measures in turns."""
  count = int(argv[0]) if argv else 2_000_000
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(argv[1] if len(argv) > 1 else made)
    write(folder, count)
    for _ in range(ROUNDS):
      for kind in KINDS:
        command = [sys.executable, __file__, str(count), str(folder), kind]
        subprocess.run(command, check=True)


if __name__ == "__main__":
  if len(sys.argv) > 3:
    measure(pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[1]))
  else:
    main(sys.argv[1:])

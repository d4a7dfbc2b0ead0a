"""Learning without labels, on photographs: `python benchmarks/unlabelled.py`.

Trains small models by several methods, continues a published backbone on
images without labels, and teaches a small model by it. Each run adds a line to
docs/unlabelled.jsonl; a run that has a line is not repeated. At the end the
table of methods is printed.

python benchmarks/unlabelled.py CIFAR [FOLDER] [--backbone=ViT-S/14]
  [--only NAME ...] [--seeds 0 1 2]

CIFAR: folder with cifar10_train.npz and cifar10_test.npz, which have the bytes
of the files. FOLDER: folder of images and runs. --backbone: weights of a ViT
that are continued, and become a teacher.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from machine import machine
from unlabelled_config import TAUGHT

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/unlabelled.jsonl"
METHODS = {
  "none": "no pre-training",
  "mae": "MAE",
  "dino": "DINO",
  "uncentred": "DINO without centring",
  "lejepa": "LeJEPA",
  "supervised": "supervised, with all labels",
}
EPOCHS, FINE_TUNED = 10, 5
TAUGHT_EPOCHS = 4
UNLABELLED = 10_000  # photographs of the training split
SCORES = ("rankme", "knn", "fewshot")
RES = 56  # pixels, for a patch of 14: the photographs have 32


def write(cifar: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes train/CLASS, val/CLASS, and `unlabelled` without classes."""
  for part, split in (("train", "train"), ("test", "val")):
    data = np.load(cifar / f"cifar10_{part}.npz")
    ends, names = data["offsets"], data["names"]
    for i, label in enumerate(data["label"]):
      encoded = data["jpeg"][ends[i] : ends[i + 1]].tobytes()
      places = [folder / "labelled" / split / str(names[label])]
      if part == "train" and i < UNLABELLED:
        places.append(folder / "unlabelled")
      for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:05}.jpg").write_bytes(encoded)


def train(
  config: str, workdir: pathlib.Path, flags: Sequence[str] = ()
) -> dict:
  """Trains as a user does; returns scores by metric and step, and seconds."""
  began = time.monotonic()
  given = os.environ.get("PYTHONPATH", str(ROOT))
  path = os.pathsep.join([str(ROOT / "examples"), given])
  subprocess.run(
    [
      *(sys.executable, "-m", "vit_jax", "train", f"--config={config}"),
      *(f"--workdir={workdir}", *flags),
    ],
    check=True,
    env=os.environ | {"PYTHONPATH": path},
  )
  rows = (workdir / "metrics.jsonl").read_text().splitlines()
  scores: dict[str, dict[int, float]] = {}
  for row in map(json.loads, rows):
    for name, value in row.items():
      if "/" in name and not name.startswith("train/"):
        scores.setdefault(name, {})[row["step"]] = round(value, 5)
  about = json.loads((workdir / "metadata.json").read_text())
  return {
    "scores": scores,
    "seconds": round(time.monotonic() - began),
    "machine": machine(),
    "versions": about["versions"],
    "commit": about["commit"],
  }


def last(row: dict, metric: str) -> float:
  """Returns the last score of a metric."""
  return [*row["scores"][metric].values()][-1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("cifar", type=pathlib.Path)
  parser.add_argument("folder", nargs="?", default="runs/unlabelled")
  parser.add_argument("--backbone")
  parser.add_argument("--only", nargs="+", default=())
  parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
  args = parser.parse_args()
  folder = pathlib.Path(args.folder).resolve()
  if not folder.exists():
    write(args.cifar, folder)
  own = f"{ROOT}/benchmarks/unlabelled_config.py:path={folder}/labelled"
  runs: dict[str, tuple[str, tuple[str, ...]]] = {}
  for method in METHODS:
    runs[method] = f"{own},method={method},epochs={EPOCHS}", ()
    init = "" if method == "none" else f",init={{runs}}/{method}"
    tuned = f"{own},method=supervised,epochs={FINE_TUNED}{init}"
    runs[f"{method}, fine-tuned"] = tuned, ()
  if args.backbone:
    size = f"res={RES}"
    labels = f"labels={folder}/labelled"
    runs["continued"] = (
      f"unlabelled:path={folder}/unlabelled,init={args.backbone},{labels},{size}",
      (
        "--config.total_steps=78",
        *(f"--config.evals.{kind}.every_steps=39" for kind in SCORES),
      ),
    )
    runs["teacher"] = (
      f"folder:path={folder}/labelled,init={args.backbone},{size},budget=0",
      ("--config.total_steps=78",),
    )
    for loss in TAUGHT:
      taught = (
        f"{own},method={loss},teacher={{runs}}/teacher,epochs={TAUGHT_EPOCHS}"
      )
      runs[f"student, {loss}"] = taught, ()
    runs["student, labels"] = (
      f"{own},method=supervised,epochs={TAUGHT_EPOCHS}",
      (),
    )
  read = lambda: [
    json.loads(line)
    for line in (RESULTS.read_text() if RESULTS.exists() else "").splitlines()
  ]
  for seed in args.seeds:
    for name, (config, flags) in runs.items():
      is_wanted = not args.only or name in args.only
      done = {(row["run"], row["seed"]) for row in read()}
      if not is_wanted or (name, seed) in done:
        continue
      place = folder / "runs" / str(seed)
      workdir = place / name.replace(", ", "_")
      config = config.format(runs=place)
      row = train(config, workdir, (*flags, f"--config.seed={seed}"))
      with RESULTS.open("a") as file:
        row = {"run": name, "seed": seed, **row}
        file.write(json.dumps(row) + "\n")
  rows = read()
  print(from_scratch(rows))


def from_scratch(rows: list[dict]) -> str:
  """Returns the table of methods, with means over seeds."""
  lines = [
    f"| {EPOCHS} epochs of | k-NN | linear | fine-tuned | RankMe | seconds |",
    "|---|---:|---:|---:|---:|---:|",
  ]
  for method, title in METHODS.items():
    own = [row for row in rows if row["run"] == method]
    tuned = [row for row in rows if row["run"] == f"{method}, fine-tuned"]
    if not own:
      continue
    mean = lambda of, metric: np.mean([last(row, metric) for row in of])
    cells = [f"{100 * mean(own, m):.1f}" for m in ("knn/20nn", "linear/top1")]
    cells.append(f"{100 * mean(tuned, 'top1/top1'):.1f}" if tuned else "")
    cells.append(f"{mean(own, 'rankme/rankme'):.1f}")
    cells.append(f"{np.mean([row['seconds'] for row in own]):,.0f}")
    lines.append(f"| {title} | {' | '.join(cells)} |")
  return "\n".join(lines)


if __name__ == "__main__":
  main()

"""One recipe, two codes: vit_jax beside timm's own train.py.

python benchmarks/beside_timm.py TRAIN_PY CIFAR [FOLDER]
  [--seeds 0 1 2] [--only CODE ...]

TRAIN_PY: train.py of timm's repository, which no wheel has. (The runs: commit
c89927a0, timm 1.0.31, and Pillow 12.2, because Pillow 13 refuses the
posterization to 0 bits that this RandAugment sometimes asks for.) CIFAR: folder
with cifar10_train.npz (20,000 photographs) and cifar10_test.npz (5,000), which
have the bytes of the files. FOLDER: folder of images, starts and runs. Each run
adds a line to docs/equal_to.jsonl; a run that has a line is not repeated.

Protocol, written before the first run:
- A ViT of width 64, 4 blocks, 2 heads, patch 8, 32 px (214,218 parameters) is
  trained from scratch in float32 on the CPU: one epoch of warm-up from 0, then
  `EPOCHS` of a cosine to 0, by update; batch 128; AdamW, 1e-3, decay 0.05 of
  kernels, gradients clipped to a norm of 1; random resized crops of 30 to 100 %
  of the area, flips, RandAugment (magnitude 9, deviation 0.5, increasing),
  mixup 0.8, label smoothing 0.1, drop path up to 0.1.
- Both codes read the same files, and both start with the weights that timm
  draws with the seed. Everything else that is random differs.
- Three seeds with each code. What counts is top-1 of the 5,000 test photographs
  after the last update; no epoch is chosen.
- The codes are the same if their means differ by less than two standard errors
  of the difference. Otherwise one thing at a time is changed until the cause is
  found.
- CPU minutes are user and system time of the process and its children, because
  other programs share the machine: imports, compilation, training and one
  evaluation. Each run is alone on one core: `taskset -c 0`, OMP_NUM_THREADS=1.

What differs, as far as reading both codes shows:
- RandAugment leaves grey (128) where it moves an image away in timm, because
  images are scaled to [-1, 1]; ImageNet's mean here.
- Mixup's partner is the last row for the first, and so on, in timm; here it is
  the row before. Here the row itself is the larger part; in timm each part is,
  in one of the two rows of a pair.
- timm leaves out the last 32 images of each permutation; here the next
  permutation follows.
- timm divides by the norm plus 1e-6 where it clips gradients.
- Adam's bias correction, 1 - 0.999^t, is float32 here, float64 in torch.
"""

import argparse
import csv
import importlib.metadata
import pathlib
import subprocess
from collections.abc import Sequence

import numpy as np
import results
from results import ROOT

RESULTS = ROOT / "docs/equal_to.jsonl"
NAME = "distribution: small ViT"  # of the rows
CODES = {"timm": "timm's train.py", "vit_jax": "vit_jax"}
EPOCHS = 2  # after one of warm-up: 468 updates
MODEL = "vit_tiny_patch16_224"  # whose sizes are replaced
SIZES = {
  "img_size": 32,
  "patch_size": 8,
  "embed_dim": 64,
  "depth": 4,
  "num_heads": 2,
}
# Writes the weights that timm draws with a seed.
START = f"""
import sys, timm
timm.utils.random_seed(int(sys.argv[1]), 0)
model = timm.create_model("{MODEL}", num_classes=10, **{SIZES})
timm.models.save_for_hf(
  model, sys.argv[2], model_args={SIZES}, safe_serialization=True
)
"""
RECIPE = (
  f"--model {MODEL} --num-classes 10 --img-size 32 --crop-pct 1.0"
  " --train-split train --val-split val --batch-size 128 --workers 0"
  " --scale 0.3 1.0 --train-interpolation bicubic --aa rand-m9-mstd0.5-inc1"
  " --mixup 0.8 --smoothing 0.1 --no-prefetcher --drop-path 0.1"
  " --opt adamw --lr 1e-3 --weight-decay 0.05 --clip-grad 1.0"
  f" --sched cosine --sched-on-updates --epochs {EPOCHS} --warmup-epochs 1"
  " --warmup-prefix --warmup-lr 0 --min-lr 0 --val-interval 1000 --device cpu"
)


def write(cifar: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes train/CLASS and val/CLASS."""
  for part, split in (("train", "train"), ("test", "val")):
    for i, (name, file) in enumerate(results.photographs(cifar, part)):
      results.write(folder / split / name / f"{i:05}.jpg", file)


def timm(
  script: pathlib.Path,
  images: pathlib.Path,
  start: pathlib.Path,
  run: pathlib.Path,
  seed: int,
) -> dict:
  """Trains with timm's train.py; returns the scores after the last epoch."""
  sizes = [f"{name}={value}" for name, value in SIZES.items()]
  _, minutes = results.call(
    [
      *(script, "--data-dir", images, *RECIPE.split(), f"--seed={seed}"),
      *("--initial-checkpoint", start / "model.safetensors"),
      *("--output", run.parent, "--experiment", run.name),
      *("--model-kwargs", *sizes),
    ]
  )
  with (run / "summary.csv").open() as file:
    last = [*csv.DictReader(file)][-1]
  names = ("timm", "torch", "torchvision", "pillow", "numpy")
  return {
    "config": RECIPE,
    "top1": float(last["eval_top1"]) / 100,
    "loss": float(last["eval_loss"]),
    "cpu_minutes": minutes,
    "versions": {name: importlib.metadata.version(name) for name in names},
  }


def vit_jax(
  images: pathlib.Path, start: pathlib.Path, run: pathlib.Path, seed: int
) -> dict:
  """Trains as a user does; returns the scores after the last step."""
  config = (
    f"benchmarks/beside_timm_config.py:path={images},init={start},"
    f"epochs={EPOCHS}"
  )
  minutes = results.train(f"{ROOT}/{config}", run, f"--config.seed={seed}")
  last = [row for row in results.metrics(run) if "val/top1" in row][-1]
  return {
    "config": config.split(":")[0],
    "top1": last["val/top1"],
    "loss": last["val/loss"],
    "cpu_minutes": minutes,
    "versions": results.origin(run)["versions"],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("script", type=pathlib.Path)
  parser.add_argument("cifar", type=pathlib.Path)
  parser.add_argument("folder", nargs="?", default="runs/beside_timm")
  parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
  parser.add_argument("--only", nargs="+", default=tuple(CODES))
  args = parser.parse_args()
  folder = pathlib.Path(args.folder).resolve()
  images, commit = folder / "images", ["git", "-C", ROOT, "rev-parse", "HEAD"]
  if not images.exists():
    write(args.cifar, images)
  for seed in args.seeds:
    start = folder / "start" / str(seed)
    if not start.exists():
      results.call(["-c", START, seed, start])
    for code in args.only:
      done = {
        (row["name"], row["code"], row["seed"]) for row in results.read(RESULTS)
      }
      if (NAME, code, seed) in done:
        continue
      run = folder / "runs" / f"{code}_{seed}"
      if code == "timm":
        row = timm(args.script.resolve(), images, start, run, seed)
      else:
        row = vit_jax(images, start, run, seed)
      row = {"name": NAME, "code": code, "seed": seed, **row}
      row["cpu_minutes"] = round(row["cpu_minutes"], 2)
      row["commit"] = subprocess.check_output(commit, text=True).strip()
      results.add(RESULTS, row)
  print(table(results.read(RESULTS)))


def table(rows: list[dict]) -> str:
  """Returns means and standard errors of both codes, and the difference."""
  lines = [
    "| code | seeds | top-1, % | test loss | CPU minutes |",
    "|---|---:|---:|---:|---:|",
  ]
  scores = {}
  for code, title in CODES.items():
    own = [r for r in rows if r["name"] == NAME and r["code"] == code]
    scores[code] = {
      "top1": mean_and_error([100 * row["top1"] for row in own]),
      "loss": mean_and_error([row["loss"] for row in own]),
    }
    (top1, error), (loss, loss_error) = scores[code].values()
    minutes = np.mean([row["cpu_minutes"] for row in own])
    lines.append(
      f"| {title} | {len(own)} | {top1:.2f} ± {error:.2f}"
      f" | {loss:.4f} ± {loss_error:.4f} | {minutes:.1f} |"
    )
  cells = []
  for score, digits in (("top1", 2), ("loss", 4)):
    (first, e), (second, f) = (scores[code][score] for code in CODES)
    error = np.hypot(e, f)
    distance = abs(second - first) / error
    cells.append(
      f"{second - first:+.{digits}f} ± {error:.{digits}f}"
      f" ({distance:.1f} standard errors)"
    )
  return "\n".join([*lines, f"| difference | | {' | '.join(cells)} | |"])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and its standard error."""
  return np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values))


if __name__ == "__main__":
  main()

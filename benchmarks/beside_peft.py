"""Fine-tuning a ViT beside timm and peft: `python benchmarks/beside_peft.py`.

The same weights, photographs, views, rates, batches and steps, once by
`vit-jax train` and once in torch (benchmarks/finetune_torch.py), by five
methods. Rates were fixed before any run, and no run chooses anything on the
images that it is scored on. Each run adds a line to docs/equal_to_peft.jsonl; a
run that has a line is not repeated. The tables are printed at the end.

python benchmarks/beside_peft.py CIFAR BACKBONE [FOLDER] [--seeds 0 1 2]
  [--only METHOD ...]

CIFAR: folder with cifar10_train.npz and cifar10_test.npz, which have the bytes
of the files. BACKBONE: weights of a ViT-S/14 of DINOv2's form. FOLDER: folder
of images and runs.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
from beside_peft_config import BATCH, METHODS, RES, STEPS, WARMUP
from machine import machine

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/equal_to_peft.jsonl"
CONFIG = ROOT / "benchmarks/beside_peft_config.py"
TITLES = {
  "full": "all parameters",
  "last_blocks": "the last 6 of 12 blocks",
  "layer_decay": "all, rates that decay by layer",
  "lora": "LoRA of query and value, rank 8",
  "probe_first": "linear probe, then all",
}
SPLITS = {"train": 1024, "val": 256, "test": 2500}


def write(cifar: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes train/CLASS, val/CLASS and test/CLASS: parts, drawn by a seed."""
  rng = np.random.default_rng(0)
  for part, splits in (("train", ("train", "val")), ("test", ("test",))):
    data = np.load(cifar / f"cifar10_{part}.npz")
    ends, names = data["offsets"], data["names"]
    order = iter(rng.permutation(len(data["label"])))
    for split in splits:
      for _, i in zip(range(SPLITS[split]), order, strict=False):
        path = folder / split / str(names[data["label"][i]]) / f"{i:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data["jpeg"][ends[i] : ends[i + 1]].tobytes())


def call(command: list) -> tuple[str, float]:
  """Runs a command of this Python; returns its output and its CPU minutes."""
  used = lambda: resource.getrusage(resource.RUSAGE_CHILDREN)
  before = used()
  done = subprocess.run(
    [sys.executable, *map(str, command)],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ,
  )
  after = used()
  seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return done.stdout, seconds / 60


def with_vit_jax(
  method: str, seed: int, data: pathlib.Path, init: str, workdir: pathlib.Path
) -> dict:
  """Trains as a user does."""

  def train(method, init, workdir):
    config = f"{CONFIG}:path={data},init={init},method={method}"
    return call(
      [
        *("-m", "vit_jax", "train", f"--config={config}"),
        *(f"--config.seed={seed}", f"--workdir={workdir}"),
      ]
    )[1]

  minutes = 0.0
  if method == "probe_first":
    minutes += train("probe", init, workdir / "head")
    init = workdir / "head/probe"
  minutes += train(method, init, workdir)
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  (top1,) = (row["test/top1"] for row in rows if "test/top1" in row)
  about = json.loads((workdir / "metadata.json").read_text())
  more = {key: about[key] for key in ("versions", "commit")}
  return {"top1": top1, "minutes": minutes, **more}


def with_torch(
  method: str, seed: int, data: pathlib.Path, weights: pathlib.Path
) -> dict:
  """Trains with timm and peft."""
  out, minutes = call(
    [
      *(ROOT / "benchmarks/finetune_torch.py", weights, data),
      *(f"--method={method}", f"--seed={seed}", f"--res={RES}"),
      *(f"--batch={BATCH}", f"--steps={STEPS}", f"--warmup={WARMUP}"),
    ]
  )
  return {"minutes": minutes, **json.loads(out.splitlines()[-1])}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("cifar", type=pathlib.Path)
  parser.add_argument("backbone")
  parser.add_argument("folder", nargs="?", default="runs/beside_peft")
  parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
  parser.add_argument("--only", nargs="+", choices=METHODS, default=(*METHODS,))
  args = parser.parse_args()
  folder = pathlib.Path(args.folder).resolve()
  data, weights = folder / "data", folder / f"timm_{RES}.safetensors"
  if not data.exists():
    write(args.cifar, data)
  if not weights.exists():
    call(
      [
        *("-m", "vit_jax", "convert", args.backbone, weights),
        *("--to=timm", f"--image_size={RES}"),
      ]
    )
  for seed in args.seeds:
    for method in args.only:
      for code in ("vit_jax", "torch"):
        if (method, code, seed) in {
          (row["method"], row["code"], row["seed"]) for row in read()
        }:
          continue
        if code == "torch":
          row = with_torch(method, seed, data, weights)
        else:
          workdir = folder / f"{method}_{seed}"
          row = with_vit_jax(method, seed, data, args.backbone, workdir)
        row["minutes"] = round(row["minutes"], 2)
        row = {"method": method, "code": code, "seed": seed, **row}
        with RESULTS.open("a") as file:
          file.write(json.dumps(row | {"machine": machine()}) + "\n")
  print(table(read()))


def read(file: pathlib.Path = RESULTS) -> list[dict]:
  """Returns the rows of a file of results; [] if there is none."""
  text = file.read_text() if file.exists() else ""
  return [json.loads(line) for line in text.splitlines()]


def table(rows: list[dict]) -> str:
  """Returns the table: means over seeds; differences with standard errors."""
  lines = [
    "| trained | vit_jax, top-1 % | timm and peft, top-1 % | difference"
    " | CPU minutes, vit_jax | timm and peft |",
    "|---|---:|---:|---:|---:|---:|",
  ]
  for method, title in TITLES.items():
    ours, theirs = (
      [r for r in rows if r["method"] == method and r["code"] == code]
      for code in ("vit_jax", "torch")
    )
    if not ours or not theirs:
      continue
    top1 = [100 * np.array([r["top1"] for r in x]) for x in (ours, theirs)]
    minutes = [np.mean([r["minutes"] for r in x]) for x in (ours, theirs)]
    # The variance over seeds, or with one seed that of independent images. The
    # images are the same, so the second is too large.
    errors = [
      x.var(ddof=1) / len(x)
      if len(x) > 1
      else x[0] * (100 - x[0]) / SPLITS["test"]
      for x in top1
    ]
    lines.append(
      f"| {title} | {top1[0].mean():.1f} | {top1[1].mean():.1f}"
      f" | {top1[0].mean() - top1[1].mean():+.1f} ± {sum(errors) ** 0.5:.1f}"
      f" | {minutes[0]:.2f} | {minutes[1]:.2f} |"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  main()

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
import pathlib

import numpy as np
import results
from beside_peft_config import BATCH, METHODS, RES, STEPS, WARMUP
from results import ROOT

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
    photographs = results.photographs(cifar, part)
    order = iter(rng.permutation(len(photographs)))
    for split in splits:
      for _, i in zip(range(SPLITS[split]), order, strict=False):
        name, file = photographs[i]
        results.write(folder / split / name / f"{i:05}.jpg", file)


def with_vit_jax(
  method: str, seed: int, data: pathlib.Path, init: str, workdir: pathlib.Path
) -> dict:
  """Trains as a user does."""
  minutes = 0.0
  config = lambda method, init: (
    f"{CONFIG}:path={data},init={init},method={method}"
  )
  flag = f"--config.seed={seed}"
  if method == "probe_first":
    head = workdir / "head"
    minutes += results.train(config("probe", init), head, flag)
    init = head / "probe"
  minutes += results.train(config(method, init), workdir, flag)
  (top1,) = (
    row["test/top1"] for row in results.metrics(workdir) if "test/top1" in row
  )
  return {"top1": top1, "minutes": minutes, **results.origin(workdir)}


def with_torch(
  method: str, seed: int, data: pathlib.Path, weights: pathlib.Path
) -> dict:
  """Trains with timm and peft."""
  out, minutes = results.call(
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
    results.call(
      [
        *("-m", "vit_jax", "convert", args.backbone, weights),
        *("--to=timm", f"--image_size={RES}"),
      ]
    )
  for seed in args.seeds:
    for method in args.only:
      for code in ("vit_jax", "torch"):
        if (method, code, seed) in {
          (row["method"], row["code"], row["seed"])
          for row in results.read(RESULTS)
        }:
          continue
        if code == "torch":
          row = with_torch(method, seed, data, weights)
        else:
          workdir = folder / f"{method}_{seed}"
          row = with_vit_jax(method, seed, data, args.backbone, workdir)
        row["minutes"] = round(row["minutes"], 2)
        row = {"method": method, "code": code, "seed": seed, **row}
        results.add(RESULTS, row)
  print(table(results.read(RESULTS)))


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

"""Learning without labels, on photographs: `python benchmarks/unlabelled.py`.

Trains small models by several methods, continues a published backbone on
images without labels, and teaches a small model by it. Each run adds a line to
docs/unlabelled.jsonl; a run that has a line is not repeated. At the end the
tables of docs/tasks/unlabelled.md and docs/unlabelled.svg are written.

python benchmarks/unlabelled.py CIFAR [FOLDER] [--backbone=ViT-S/14]
  [--only NAME ...] [--seeds 0 1 2]

CIFAR: folder with cifar10_train.npz and cifar10_test.npz, which have the bytes
of the files. FOLDER: folder of images and runs. --backbone: weights of a ViT
that are continued, and become a teacher.
"""

import argparse
import pathlib
import time

import numpy as np
import results
from results import ROOT
from tables import with_tables
from unlabelled_config import PROTOTYPES, TAUGHT

from vit_jax.tools.reporting import charts

RESULTS = ROOT / "docs/unlabelled.jsonl"
PAGE, PLOT = ROOT / "docs/tasks/unlabelled.md", ROOT / "docs/unlabelled.svg"
METHODS = {
  "none": "no pre-training",
  "mae": "MAE",
  "dino": "DINO",
  "uncentred": "DINO without centring, 2 epochs",
  "lejepa": "LeJEPA",
}
EPOCHS, FINE_TUNED, COLLAPSED = 5, 5, 2
TAUGHT_EPOCHS = 5
FEW = {"train": 4, "val": 2}  # distance of the photographs of a part
UNLABELLED = 10_000  # every second photograph of the training split
STEPS = 156  # of an epoch
STUDENTS = {
  "labels": "labels alone",
  "soft": "labels and soft targets",
  "hard": "labels and the teacher's classes",
  "logits": "logits, without labels",
  "features": "features, without labels",
}
SCORES = ("rankme", "knn", "fewshot")
BATCH = 32  # of the continued backbone
RES, TEACHER_RES = 56, 42  # pixels, for a patch of 14: the photographs have 32


def write(cifar: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes train/CLASS and val/CLASS, a part of them, and images alone."""
  for part, split in (("train", "train"), ("test", "val")):
    for i, (name, file) in enumerate(results.photographs(cifar, part)):
      places = [folder / "labelled" / split / name]
      if part == "train" and i % 2 == 0:
        places.append(folder / "unlabelled")
      if i % FEW[split] == 0:
        places.append(folder / "few" / split / name)
      for place in places:
        results.write(place / f"{i:05}.jpg", file)


def train(config: str, workdir: pathlib.Path, *flags: str) -> dict:
  """Trains as a user does; returns scores by metric and step, and seconds."""
  began = time.monotonic()
  results.train(config, workdir, *flags)
  scores: dict[str, dict[int, float]] = {}
  for row in results.metrics(workdir):
    for name, value in row.items():
      is_score = "/" in name and not name.startswith("train/")
      name = name.removeprefix("train/")
      if is_score or name in ("teacher_entropy", "teacher_kl"):
        scores.setdefault(name, {})[row["step"]] = round(value, 5)
  seconds = round(time.monotonic() - began)
  return {"scores": scores, "seconds": seconds, **results.origin(workdir)}


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
    epochs = COLLAPSED if method == "uncentred" else EPOCHS
    runs[method] = f"{own},method={method},epochs={epochs}", ()
    init = "" if method == "none" else f",init={{runs}}/{method}"
    tuned = f"{own},method=supervised,epochs={FINE_TUNED}{init}"
    runs[f"{method}, fine-tuned"] = tuned, ()
  if args.backbone:
    size = f"res={RES},images={UNLABELLED}"
    labels = f"labels={folder}/few"
    runs["continued"] = (
      f"unlabelled:path={folder}/unlabelled,init={args.backbone},{labels},{size}",
      tuple(f"--config.evals.{kind}.every_steps=78" for kind in SCORES),
    )
    runs["teacher"] = (
      f"folder:path={folder}/few,init={args.backbone},res={TEACHER_RES},budget=0",
      ("--config.total_steps=78", "--config.optim.warmup_steps=8"),
    )
    own = f"{ROOT}/benchmarks/unlabelled_config.py:path={folder}/few"
    for loss in TAUGHT:
      taught = (
        f"{own},method={loss},teacher={{runs}}/teacher,epochs={TAUGHT_EPOCHS}"
      )
      runs[f"student, {loss}"] = taught, ()
    runs["student, labels"] = (
      f"{own},method=supervised,epochs={TAUGHT_EPOCHS}",
      (),
    )
  for seed in args.seeds:
    for name, (config, flags) in runs.items():
      is_wanted = not args.only or name in args.only
      done = {(row["run"], row["seed"]) for row in results.read(RESULTS)}
      if not is_wanted or (name, seed) in done:
        continue
      place = folder / "runs" / str(seed)
      workdir = place / name.replace(", ", "_")
      config = config.format(runs=place)
      row = train(config, workdir, *flags, f"--config.seed={seed}")
      results.add(RESULTS, {"run": name, "seed": seed, **row})
  rows = results.read(RESULTS)
  made = {
    "from_scratch": lambda: from_scratch(rows),
    "continued": lambda: continued(rows),
    "taught": lambda: taught(rows),
  }
  PAGE.write_text(with_tables(PAGE.read_text(), made))
  PLOT.write_text(charts.render(lambda: draw(rows)), "utf-8")


def of(rows: list[dict], name: str) -> list[dict]:
  """Returns the rows of a run, one for each seed."""
  return [row for row in rows if row["run"] == name]


def percent(rows: list[dict], metric: str, step: int | None = None) -> str:
  """Returns the mean over seeds of a score after a step, or of the last one."""
  scores = [row["scores"].get(metric) for row in rows]
  if not scores or None in scores:
    return ""
  key = (
    (lambda of_run: [*of_run][-1]) if step is None else (lambda _: str(step))
  )
  return f"{100 * np.mean([s[key(s)] for s in scores]):.1f}"


def targets(row: dict) -> float:
  """Returns how many different targets the teacher had in a batch, at last."""
  entropy = last(row, "teacher_entropy") + last(row, "teacher_kl")
  return PROTOTYPES / np.exp(entropy)


def from_scratch(rows: list[dict]) -> str:
  """Returns the table of methods."""
  lines = [
    f"| pre-training, {EPOCHS} epochs | k-NN | linear | RankMe | targets"
    f" | then {FINE_TUNED} epochs with labels |",
    "|---|---:|---:|---:|---:|---:|",
  ]
  titles = METHODS | {"none, fine-tuned": "with labels"}
  for method, title in titles.items():
    own, tuned = of(rows, method), of(rows, f"{method}, fine-tuned")
    if not own:
      continue
    cells = [percent(own, m) for m in ("knn/20nn", "linear/top1")]
    cells.append(f"{np.mean([last(row, 'rankme/rankme') for row in own]):.1f}")
    has_targets = all("teacher_kl" in row["scores"] for row in own)
    number = np.mean([targets(row) for row in own]) if has_targets else 0
    cells.append(f"{number:.3f}" if has_targets else "")
    cells.append(percent(tuned, "top1/top1"))
    lines.append(f"| {title} | {' | '.join(cells)} |")
  return "\n".join(lines)


def continued(rows: list[dict]) -> str:
  """Returns the table of the backbone, before, during and after."""
  own = of(rows, "continued")
  lines = [
    "| images seen | k-NN | 10 labels per class | RankMe |",
    "|---:|---:|---:|---:|",
  ]
  for step in own[0]["scores"]["knn/20nn"] if own else ():
    rank = np.mean([row["scores"]["rankme/rankme"][step] for row in own])
    lines.append(
      f"| {BATCH * int(step):,} | {percent(own, 'knn/20nn', step)}"
      f" | {percent(own, 'fewshot/10shot', step)} | {rank:.1f} |"
    )
  return "\n".join(lines)


def taught(rows: list[dict]) -> str:
  """Returns the table of students."""
  lines = [
    "| learns from | top-1 | linear on features | k-NN |",
    "|---|---:|---:|---:|",
  ]
  for loss, title in STUDENTS.items():
    own = of(rows, f"student, {loss}")
    if not own:
      continue
    cells = [percent(own, m) for m in ("top1/top1", "linear/top1", "knn/20nn")]
    lines.append(f"| {title} | {' | '.join(cells)} |")
  return "\n".join(lines)


def draw(rows: list[dict]) -> charts.Figure:
  """Draws k-NN over epochs, by method; the first seed."""
  lines = []
  titles = METHODS | {"none, fine-tuned": "with labels"}
  for method, title in titles.items():
    own = of(rows, method)
    if own and method != "none":
      scores = own[0]["scores"]["knn/20nn"]
      epochs = [int(step) / STEPS for step in scores]
      lines.append(
        charts.Line(title, epochs, [100 * v for v in scores.values()])
      )
  return charts.curves(
    "k-NN of the validation images",
    lines,
    "{:.1f}%",
    x_label="epoch",
    tick="{:g}%".format,
  )


if __name__ == "__main__":
  main()

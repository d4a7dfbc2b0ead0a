"""The paper in miniature: `python benchmarks/study.py`, or `make study`.

Trains the runs of `grid`, one after the other, and writes a line for each to
docs/study.jsonl: config, scores, FLOPs, seconds, versions, commit and machine.
A run that has a line is not repeated, so the same command continues where it
was stopped; an interrupted run starts again. The results are in
benchmarks/notes/study.md; study_report.py makes its figures and tables.

python benchmarks/study.py [RESULTS.jsonl [FOLDER OF RUNS]]
"""

import argparse
import dataclasses
import gc
import json
import pathlib
import time
from collections.abc import Iterator

import results
from results import ROOT

RESULTS = ROOT / "docs" / "study.jsonl"
CONFIG = "configs/study.py"

SEEDS = (0, 1, 2)
FAMILIES = ("vit", "hybrid", "resnet")
IMAGES = (640, 2560, 10_240, 40_000)
STEPS = (300, 600, 1200)
POSITIONS = (
  ("none", "stem"),
  ("learn", "stem"),
  ("learn", "blocks"),
  ("learn", "shared"),
  ("learn2d", "stem"),
  ("learn2d", "blocks"),
  ("learn2d", "shared"),
  ("relative", "stem"),
)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run: the arguments of configs/study.py, and the run it starts from."""

  model: str
  seed: int
  images: int = IMAGES[-1]
  steps: int = STEPS[-1]
  posemb: str = "learn"
  posemb_at: str = "stem"
  task: str = "glyphs"
  init: "Run | None" = None

  @property
  def name(self) -> str:
    """Name of its folder; its own, and the same at any time."""
    parts = [self.task, self.model, self.posemb, self.posemb_at]
    parts += [f"images{self.images}", f"steps{self.steps}", f"seed{self.seed}"]
    if self.task == "digits":
      of = self.init.task if self.init else "scratch"
      parts = [f"digits-from-{of}", self.model, f"seed{self.seed}"]
    return "_".join(parts)

  def argument(self, runs: pathlib.Path) -> str:
    """Returns the text after configs/study.py: and the colon."""
    values = {"model": self.model, "seed": self.seed, "task": self.task}
    if self.task != "digits":
      values |= {"images": self.images, "steps": self.steps}
      values |= {"posemb": self.posemb, "posemb_at": self.posemb_at}
    if self.init:
      values["init"] = runs / self.init.name
    return ",".join(f"{k}={v}" for k, v in values.items())


def grid() -> tuple[Run, ...]:
  """Returns all runs, each once; those of the first seed come first."""
  return tuple(dict.fromkeys(run for seed in SEEDS for run in _of_seed(seed)))


def _of_seed(seed: int) -> Iterator[Run]:
  for steps in reversed(STEPS):  # figure 5
    for family in FAMILIES:
      yield Run(f"{family}-small", seed, steps=steps)
  for family in FAMILIES:
    yield Run(f"{family}-medium", seed)
  for images in IMAGES:  # figure 4
    for family in FAMILIES:
      yield Run(f"{family}-small", seed, images)
  for posemb, at in POSITIONS:  # table 8
    yield Run("vit-small", seed, posemb=posemb, posemb_at=at)
  supervised = Run("vit-small", seed)  # section 4.6
  masked = dataclasses.replace(supervised, task="masked")
  yield masked
  for init in (None, supervised, masked):
    yield Run("vit-small", seed, task="digits", init=init)


def read(path: pathlib.Path) -> dict[str, dict]:
  """Returns the lines of a file of results, by the names of their runs."""
  return {line["name"]: line for line in results.read(path)}


def train(run: Run, folder: pathlib.Path) -> dict:
  """Trains a run to its end, and returns its line."""
  import jax

  from vit_jax.config import freeze, recipe
  from vit_jax.train import train_and_evaluate

  config = freeze(recipe(f"{CONFIG}:{run.argument(folder)}"))
  workdir = folder / run.name
  began, cpu = time.perf_counter(), time.process_time()
  train_and_evaluate(config, str(workdir))
  seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
  metadata = json.loads((workdir / "metadata.json").read_text())
  flops = config.model.train_flops(
    tuple(metadata["image_size"]), metadata["num_classes"] or 0
  )
  images = config.total_steps * config.data.batch_size
  # Each run compiles functions of its own, which jax would keep.
  jax.clear_caches()
  gc.collect()
  return {
    "name": run.name,
    "config": f"{CONFIG}:{run.argument(pathlib.Path('runs/study'))}",
    **{k: v for k, v in dataclasses.asdict(run).items() if k != "init"},
    "init": run.init.name if run.init else None,
    "scores": scores(workdir),
    "num_params": metadata["num_params"],
    "images_seen": images,
    "train_flops": flops * images,
    "seconds": round(seconds, 1),
    "cpu_seconds": round(cpu, 1),
    **results.origin(workdir),
  }


def scores(workdir: pathlib.Path) -> dict[str, float]:
  """Returns the last value of every score."""
  last = {}
  for row in results.metrics(workdir):
    last |= {k: v for k, v in row.items() if "shot" in k or "top1" in k}
  return {k: round(v, 5) for k, v in sorted(last.items())}


def main() -> None:
  from vit_jax.callbacks import startup

  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("results", nargs="?", type=pathlib.Path, default=RESULTS)
  folder = ROOT / "runs" / "study"
  parser.add_argument("folder", nargs="?", type=pathlib.Path, default=folder)
  args = parser.parse_args()
  startup.use_cache()
  runs = grid()
  for number, run in enumerate(runs, 1):
    if run.name in read(args.results):
      continue
    print(f"study       {number} of {len(runs)}: {run.name}", flush=True)
    if run.init and not (args.folder / run.init.name / "checkpoints").exists():
      train(run.init, args.folder)  # its line came from another folder
    results.add(args.results, train(run, args.folder))


if __name__ == "__main__":
  main()

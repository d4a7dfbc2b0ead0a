"""The paper in miniature: `python benchmarks/study.py`, or `make study`.

Trains the runs of `grid`, one after the other, and writes a line for each to
docs/study.jsonl: config, scores, FLOPs, seconds, versions, commit and machine.
A run that has a line is not repeated, so the same command continues where it
was stopped; an interrupted run starts again. Only one process may write to a
file of results and its folder. The results are in
benchmarks/notes/study.md; study_report.py makes its figures and tables.

python benchmarks/study.py [RESULTS.jsonl [FOLDER OF RUNS]]
"""

import argparse
import dataclasses
import gc
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

# ruff: noqa: E402
from machine import machine

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


def grid(seeds: Iterable[int] = SEEDS) -> tuple[Run, ...]:
  """Returns all runs, each once; those of the first seed come first."""
  runs: dict[Run, None] = {}
  for seed in seeds:
    runs |= dict.fromkeys(_of_seed(seed))
  return tuple(runs)


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
  if not path.exists():
    return {}
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return {line["name"]: line for line in lines}


def study(
  runs: Iterable[Run],
  results: pathlib.Path,
  folder: pathlib.Path,
  overrides: Sequence[str] = (),
) -> None:
  """Trains the runs that have no line yet, and adds their lines.

  Args:
    runs: A run comes after the one that it starts from.
    results: File of lines, JSON each.
    folder: Where the runs have their folders.
    overrides: Flags of all runs, such as "--config.fake_data=True".
  """
  runs = tuple(runs)
  results.parent.mkdir(parents=True, exist_ok=True)
  for number, run in enumerate(runs, 1):
    if run.name in read(results):
      continue
    print(f"study       {number} of {len(runs)}: {run.name}", flush=True)
    if run.init and not (folder / run.init.name / "checkpoints").exists():
      _train(run.init, folder, overrides)  # its line came from elsewhere
    line = _train(run, folder, overrides)
    with results.open("a") as f:
      f.write(json.dumps(line) + "\n")


def _train(run: Run, folder: pathlib.Path, overrides: Sequence[str]) -> dict:
  """Trains a run to its end, and returns its line."""
  import jax

  from vit_jax.config import ConfigError, cli
  from vit_jax.train import train_and_evaluate
  from vit_jax.writers import run_info

  argument = run.argument(folder)
  flags = [f"--config={ROOT / CONFIG}:{argument}", *overrides]
  args = cli.parse("study", {}, flags)
  if args.errors:
    raise ConfigError(args.errors)
  config, workdir = args.config, folder / run.name
  began, cpu = time.perf_counter(), _cpu_seconds()
  train_and_evaluate(config, str(workdir))
  seconds = time.perf_counter() - began
  metadata = json.loads((workdir / "metadata.json").read_text())
  flops = config.model.train_flops(
    tuple(metadata["image_size"]), metadata["num_classes"] or 0
  )
  images = config.total_steps * config.data.batch_size
  line = {
    "name": run.name,
    "config": f"{CONFIG}:{run.argument(pathlib.Path('runs/study'))}",
    **{k: v for k, v in dataclasses.asdict(run).items() if k != "init"},
    "init": run.init.name if run.init else None,
    "scores": _scores(workdir),
    "num_params": metadata["num_params"],
    "images_seen": images,
    "train_flops": flops * images,
    "seconds": round(seconds, 1),
    "cpu_seconds": round(_cpu_seconds() - cpu, 1),
    "commit": run_info.commit() or "unknown",
    "machine": machine(),
    "versions": run_info.versions(),
  }
  # Each run compiles functions of its own, which jax would keep.
  jax.clear_caches()
  gc.collect()
  return line


def _scores(workdir: pathlib.Path) -> dict[str, float]:
  """Returns the last value of every score."""
  scores = {}
  for text in (workdir / "metrics.jsonl").read_text().splitlines():
    values = json.loads(text)
    scores |= {k: v for k, v in values.items() if "shot" in k or "top1" in k}
  return {k: round(v, 5) for k, v in sorted(scores.items())}


def _cpu_seconds() -> float:
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("results", nargs="?", type=pathlib.Path, default=RESULTS)
  folder = ROOT / "runs" / "study"
  parser.add_argument("folder", nargs="?", type=pathlib.Path, default=folder)
  args = parser.parse_args(argv)
  from vit_jax.callbacks import startup

  startup.use_cache()
  study(grid(), args.results, args.folder)


if __name__ == "__main__":
  main()

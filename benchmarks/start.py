"""Times the start of every command: `--help`, a prediction, the first step.

Run: python benchmarks/start.py [--short] [NAME=CHECKOUT ...]
With several checkouts, such as before=../old after=., every command runs in all
of them in turns. Prints a table with medians of seconds on the clock and of all
cores, and with the large packages that a command imports. "cold" means without
compiled programs in jax's cache, "warm" with them; Python's bytecode and the
data are always cached.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

# ruff: noqa: E402
from predict_speed import make_images, make_weights

from vit_jax.commands import COMMANDS

LARGE = (
  "jax", "flax", "optax", "orbax", "tensorstore", "tensorflow",
  "tensorflow_datasets", "matplotlib", "scipy", "sklearn", "pandas", "einops",
  "torch",
)  # fmt: skip
FIRST_STEP = "start  "  # the line after it


class Command(NamedTuple):
  """Words after `python`; whether programs are cached; where it is stopped.

  is_warm: None: it compiles nothing.
  until: Beginning of the line at which it has done what is timed; None: its
    end.
  """

  arguments: Sequence[str]
  is_warm: bool | None = None
  until: str | None = None


class Took(NamedTuple):
  """Seconds on the clock, seconds of all cores, and the packages loaded."""

  wall: float
  cpu: float
  packages: set[str]


def commands(folder: pathlib.Path, is_short: bool) -> dict[str, Command]:
  """Returns the commands by their names in the table."""
  image, weights = folder / "images/all/00000.jpg", folder / "b16.safetensors"
  make_images(folder / "images", 1)
  make_weights("B/16", weights)
  vit = ("-m", "vit_jax")
  predict = (*vit, "predict", str(weights), str(image))
  train = (*vit, "train", "--config=glyphs", f"--workdir={folder / 'run'}")
  verbs = ("train", "predict") if is_short else COMMANDS
  helps = {f"{verb} --help": Command((*vit, verb, "--help")) for verb in verbs}
  modules = {
    f"python -m vit_jax.{m} --help": Command(("-m", f"vit_jax.{m}", "--help"))
    for m in ("train", "benchmark")
  }
  npz, trained = folder / "b16.npz", folder / "trained"
  short = ("--config.total_steps=2", "--config.optim.warmup_steps=1")
  evaluate = (*vit, "evaluate", f"--checkpoint={trained}")
  subprocess.run(
    [sys.executable, *train[:-1], f"--workdir={trained}", *short],
    stdout=subprocess.DEVNULL,
    check=True,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(HERE)},
  )
  return {
    **helps,
    **modules,
    **({} if is_short else {"models": Command((*vit, "models"))}),
    "convert B/16": Command(
      (*vit, "convert", str(weights), str(npz), "--to=npz")
    ),
    "predict, B/16, an image, cold": Command(predict, False),
    "predict, B/16, an image, warm": Command(predict, True),
    "evaluate, glyphs, cold": Command(evaluate, False),
    "evaluate, glyphs, warm": Command(evaluate, True),
    "train, glyphs, first step, cold": Command(train, False, FIRST_STEP),
    "train, glyphs, first step, warm": Command(train, True, FIRST_STEP),
  }


def timed(
  command: Command,
  checkout: pathlib.Path,
  folder: pathlib.Path,
  lists_imports: bool = False,
) -> Took:
  """Runs a command to its end, or until it has printed its line."""
  for left in ("run", "b16.npz", *(["cold"] if not command.is_warm else [])):
    subprocess.run(["rm", "-rf", str(folder / left)], check=True)
  env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
  env["PYTHONPATH"] = str(checkout)
  cache = "warm" if command.is_warm else "cold"
  env["JAX_COMPILATION_CACHE_DIR"] = str(folder / cache)
  options = ("-X", "importtime") if lists_imports else ()
  lines, began, cpu = [], time.monotonic(), None
  process = subprocess.Popen(
    [sys.executable, *options, *command.arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=env,
    cwd=folder,
  )
  for line in process.stdout:
    lines.append(line)
    if command.until and line.startswith(command.until):
      wall, cpu = time.monotonic() - began, _cpu(process.pid)
      process.kill()
      break
  if cpu is None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    wall, cpu = time.monotonic() - began, _cpu(process.pid)
  process.wait()
  if process.returncode and not (command.until and process.returncode < 0):
    sys.exit(f"{''.join(lines[-20:])}{command.arguments}: failed")
  names = {
    line.rpartition("|")[2].strip().partition(".")[0]
    for line in lines
    if line.startswith("import time:")
  }
  return Took(wall, cpu, names & {*LARGE})


def _cpu(pid: int) -> float:
  """Returns the seconds of all cores that a process, or a zombie, has used."""
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  user, system = map(int, fields.split()[11:13])
  return (user + system) / os.sysconf("SC_CLK_TCK")


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("checkouts", nargs="*", metavar="NAME=CHECKOUT")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--short", action="store_true", help="a few, once")
  args = parser.parse_args()
  pairs = [c.partition("=") for c in args.checkouts or [f"here={HERE}"]]
  checkouts = {name: pathlib.Path(path).resolve() for name, _, path in pairs}
  with tempfile.TemporaryDirectory() as home:
    folder = pathlib.Path(home)
    parts = ("s", "CPU s", "loads")
    columns = [f"{name}, {part}" for name in checkouts for part in parts]
    print("| command |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns), flush=True)
    for name, command in commands(folder, args.short).items():
      loaded = {}
      for key, checkout in checkouts.items():  # also fills all caches
        loaded[key] = timed(command, checkout, folder, True).packages
      runs = {key: [] for key in checkouts}
      for _ in range(1 if args.short else args.repeats):
        for key, checkout in checkouts.items():
          runs[key].append(timed(command, checkout, folder))
      cells = []
      for key, took in runs.items():
        cells += [f"{statistics.median(t.wall for t in took):.2f}"]
        cells += [f"{statistics.median(t.cpu for t in took):.2f}"]
        cells += [", ".join(p for p in LARGE if p in loaded[key]) or "none"]
      print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
  main()

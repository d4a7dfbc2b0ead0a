"""Tries to lose runs: `make faults`, or `python -m faults [NAME..]`.

Runs the trials, each in its own process, appends a line for each passed trial
to docs/reliability.jsonl, and writes the table of
benchmarks/notes/reliability_trials.md. A trial that has a line for the same
code and versions is not run again, so the command continues where it was
stopped. Trials whose names begin with NAME are always run. `python -m faults`
needs PYTHONPATH=.:tests:benchmarks.

  --seed=N      seed of random numbers; default: from the clock, printed
  --workers=N   trials at the same time; default: 2
  --list        only prints the names
  --page        only writes the page
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tables
from machine import machine

import faults
from faults.trial import Trial

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = ROOT / "docs" / "reliability.jsonl"
PAGE = ROOT / "benchmarks" / "notes" / "reliability_trials.md"
PACKAGES = ("jax", "orbax-checkpoint", "tensorflow-cpu", "numpy")
FOLDERS = ("vit_jax", "configs", "tests/faults")  # of the code that runs
LIMIT = 1200  # seconds of one trial
FIGURE = "figure: "  # begins the line; threads may print more after it


def all_trials() -> dict[str, Trial]:
  """Returns the trials by name, in the order of the page."""
  every = [
    trial
    for name in faults.MODULES
    for trial in importlib.import_module(f"faults.{name}").TRIALS
  ]
  names = [trial.name for trial in every]
  assert len(set(names)) == len(names), "two trials have one name"
  return dict(zip(names, every, strict=True))


def code() -> str:
  """Returns a digest of all code that the trials run."""
  digest = hashlib.blake2b(digest_size=8)
  for folder in FOLDERS:
    for path in sorted((ROOT / folder).rglob("*.py")):
      digest.update(path.relative_to(ROOT).as_posix().encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()


def versions() -> dict[str, str]:
  installed = {"python": platform.python_version()}
  for package in PACKAGES:
    try:
      installed[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return installed


def read() -> list[dict[str, Any]]:
  """Returns the lines, oldest first; one that was cut off is left out."""
  lines = []
  for text in LINES.read_text().splitlines() if LINES.exists() else []:
    try:
      lines.append(json.loads(text))
    except json.JSONDecodeError:
      continue
  return lines


def run_one(name: str, seed: int) -> None:
  """Runs a trial in this process; prints a line with its figure."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}."))
  try:
    figure = all_trials()[name].run(folder, seed)
  finally:
    if not os.environ.get("KEEP"):
      shutil.rmtree(folder, ignore_errors=True)
  print(FIGURE + json.dumps(figure), flush=True)


@contextlib.contextmanager
def shared_data() -> Iterator[None]:
  """A folder in which all trials have their data and compiled programs."""
  with tempfile.TemporaryDirectory(prefix="faults.") as folder:
    os.environ["TRIALS_SHARE"] = folder
    env = {"TFDS_DATA_DIR": f"{folder}/tfds", **os.environ}
    code = "from vit_jax.data.sources import Sources as S\n"
    code += "for split in ('train', 'test'): S().open('digits', split)"
    # Otherwise trials that start together would all prepare it.
    subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, check=True)
    yield


def start(name: str, seed: int) -> tuple[str | None, str, float]:
  """Runs a trial in a process of its own.

  Returns:
    The figure, or None where it failed; what it printed; seconds.
  """
  began = time.monotonic()
  command = [sys.executable, "-m", "faults", "--one", name, "--seed", str(seed)]
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
  try:
    done = subprocess.run(
      command,
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      timeout=LIMIT,
      text=True,
      errors="replace",
    )
  except subprocess.TimeoutExpired as e:
    output = (e.output or b"").decode(errors="replace")
    return (
      None,
      f"{output}\nnot done after {LIMIT} s",
      time.monotonic() - began,
    )
  seconds = time.monotonic() - began
  if done.returncode:
    return None, done.stdout, seconds
  lines = done.stdout.splitlines()
  (figure,) = (x for x in lines if x.startswith(FIGURE))
  return json.loads(figure.removeprefix(FIGURE)), done.stdout, seconds


def commit() -> str:
  git = ["git", "-C", str(ROOT)]
  head = subprocess.run(
    [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
  )
  changed = subprocess.run(
    [*git, "status", "--porcelain", "--", *FOLDERS],
    capture_output=True,
    text=True,
  )
  return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def write_page() -> None:
  """Writes the table: the newest line of every trial."""
  newest = {line["name"]: line for line in read()}
  rows = [
    "| guarantee | figure | test | seconds | versions |",
    "|" + "---|" * 5,
  ]
  by_guarantee: dict[str, list[Trial]] = {}
  for trial in all_trials().values():
    by_guarantee.setdefault(trial.guarantee, []).append(trial)
  for guarantee, parts in by_guarantee.items():
    lines = [newest[part.name] for part in parts if part.name in newest]
    name, small = parts[0].name, parts[0].small
    name = name if len(parts) == 1 else name.rpartition(".")[0]
    tests = f"`{name}`" + (f"; `{small}`" if small else "")
    figures = [line["figure"] for line in lines]
    figures += ["not yet run"] * (len(lines) < len(parts))
    cells = "", ""
    if lines:
      known, seconds = lines[-1]["versions"], sum(l["seconds"] for l in lines)
      commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
      cells = (
        f"{seconds:.0f}",
        f"Python {known['python']}, jax {known['jax']}, Orbax"
        f" {known['orbax-checkpoint']}; {commits}; {lines[-1]['date']}",
      )
    row = guarantee, "<br>".join(figures), tests, *cells
    rows.append("| " + " | ".join(row) + " |")
  text = "\n".join(["<!-- receipt: reliability.jsonl -->", *rows])
  page = tables.with_tables(PAGE.read_text(), {"trials": lambda: text})
  PAGE.write_text(page)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("names", nargs="*")
  parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--list", action="store_true")
  parser.add_argument("--page", action="store_true")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.one:
    run_one(args.one, args.seed)
    return 0
  known, digest, installed = all_trials(), code(), versions()
  if args.list:
    print(*known, sep="\n")
    return 0
  done = {
    line["name"]
    for line in read()
    if line["code"] == digest and line["versions"] == installed
  }
  chosen = [
    name
    for name in known
    if (
      any(map(name.startswith, args.names)) if args.names else name not in done
    )
  ]
  failed = []
  # The longest first, so that no core idles at the end.
  chosen.sort(key=lambda name: -known[name].seconds)
  if not args.page:
    print(f"{len(chosen)} of {len(known)} trials, seed {args.seed}", flush=True)
    with (
      shared_data(),
      concurrent.futures.ThreadPoolExecutor(args.workers) as pool,
    ):
      running = {pool.submit(start, n, args.seed): n for n in chosen}
      for future in concurrent.futures.as_completed(running):
        name = running[future]
        figure, output, seconds = future.result()
        if figure is None:
          failed.append(name)
          print(f"FAILED {name}, {seconds:.0f} s\n{output[-6000:]}", flush=True)
          continue
        print(f"passed {name}, {seconds:.0f} s: {figure}", flush=True)
        line = {
          "name": name,
          "figure": figure,
          "seconds": round(seconds, 1),
          "seed": args.seed,
          "date": datetime.date.today().isoformat(),
          "commit": commit(),
          "versions": installed,
          "machine": machine(),
          "code": digest,
        }
        with LINES.open("a") as file:
          file.write(json.dumps(line) + "\n")
  write_page()
  if failed:
    print(f"{len(failed)} failed: {', '.join(failed)}")
  return bool(failed)


if __name__ == "__main__":
  sys.exit(main())

"""Writes docs/models.md, and the parameters in vit_jax/families/published.csv.

Run: python benchmarks/published_models.py [--speed]

With --speed, models of up to 400 GFLOPs are timed before, on one core of this
machine (docs/models_speed.jsonl). It takes about half an hour, and goes on
where it was stopped.
"""

import csv
import io
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
from machine import machine
from tables import with_tables

from vit_jax.families import ModelConfig, published
from vit_jax.tools import model_table
from vit_jax.tools.model_table import Cells

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
LIST = ROOT / "vit_jax/families/published.csv"
SPEEDS = ROOT / "docs/models_speed.jsonl"
LIMITS = (3, 10, 40, 125, 400)  # most GFLOPs of the models that are compared
BATCH = 4


class Speeds:
  """Images per second by model, in docs/models_speed.jsonl."""

  def __init__(self):
    rows = map(json.loads, SPEEDS.read_text().splitlines())
    self.rows = {(r["model"], r["pixels"]): r for r in rows}

  def cell(self, cells: Cells) -> str:
    """Returns the speed of a row, "" if it was not measured."""
    row = self.rows.get((cells.model, cells.pixels))
    return f"{row['images_per_second']:.1f}" if row else ""


def count(model: ModelConfig, pixels: int) -> int:
  """Returns the number of parameters without a classifier.

  Args:
    model: The model.
    pixels: Side of the images, which decides the length of a position table.
  """
  import jax  # the page is written without it

  from vit_jax.models import build

  # With a scan only one block is traced; the number of parameters is the same.
  images = jax.ShapeDtypeStruct((1, pixels, pixels, 3), "float32")
  init = build(model.stacked() or model, 0).init
  params = jax.eval_shape(init, jax.random.key(0), images)["params"]
  return sum(x.size for x in jax.tree.leaves(params))


def counted() -> str:
  """Returns the text of the list with the number of parameters in all rows."""
  out, known = io.StringIO(), {}
  lines = list(csv.DictReader(io.StringIO(LIST.read_text())))
  writer = csv.DictWriter(out, lines[0].keys(), lineterminator="\n")
  writer.writeheader()
  for line, row in zip(lines, published.rows(), strict=True):
    key = row.series, row.variant, row.pixels
    if key not in known:
      known[key] = count(model_table.model_of(row), row.pixels)
    writer.writerow(line | {"parameters": known[key]})
  return out.getvalue()


def best() -> Iterator[tuple[int, Cells]]:
  """Yields limits of cost, with the best published accuracy up to each."""
  scored = [c for c in model_table.table() if c.top1 and " " not in c.top1]
  for limit in LIMITS:
    known = [c for c in scored if float(c.gflops.replace(",", "")) <= limit]
    yield limit, max(known, key=lambda c: float(c.top1))


def images_per_second(model: ModelConfig, pixels: int) -> float:
  """Returns the speed of the forward pass, the best of two batches.

  Args:
    model: The model.
    pixels: Side of the images.
  """
  import jax
  import jax.numpy as jnp

  from vit_jax.models import build

  module, images = build(model, 0), jnp.zeros((BATCH, pixels, pixels, 3))
  shapes = jax.eval_shape(module.init, jax.random.key(0), images)
  variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  forward = jax.jit(lambda v, x: module.apply(v, x)[0])
  seconds = []
  for _ in range(3):  # the first one compiles
    began = time.process_time()
    forward(variables, images).block_until_ready()
    seconds.append(time.process_time() - began)
  return BATCH / min(seconds[1:])


def measure() -> None:
  """Adds the speeds that docs/models_speed.jsonl lacks."""
  import jax

  # Before jax makes its threads.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  about = {"batch": BATCH, "jax": jax.__version__, "machine": machine()}
  for row, cells in zip(published.rows(), model_table.table(), strict=True):
    is_known = (cells.model, cells.pixels) in Speeds().rows
    if is_known or float(cells.gflops.replace(",", "")) > LIMITS[-1]:
      continue
    speed = images_per_second(model_table.model_of(row), row.pixels)
    line = {"model": cells.model, "pixels": cells.pixels}
    line |= {"images_per_second": round(speed, 2)} | about
    with SPEEDS.open("a") as file:
      file.write(json.dumps(line) + "\n")
    print(*line.values(), flush=True)


def _best_rows(speeds: Speeds) -> Iterator[str]:
  for limit, one in best():
    yield (
      f"| {limit} | {one.top1} | {one.model} | {one.pixels} | {one.parameters}"
      f" | {one.gflops} | {speeds.cell(one)} | `{one.files[0]}` |"
    )


def tables(speeds: Speeds) -> Iterator[str]:
  """Yields the lines of a table for each series."""
  every = zip(published.rows(), model_table.table(), strict=True)
  for series, group in itertools.groupby(every, lambda pair: pair[0].series):
    rows = _table([cells for _, cells in group], speeds)
    yield from ("", f"## {series}", "", *rows)


def _table(rows: Iterable[Cells], speeds: Speeds) -> Iterator[str]:
  names = list(model_table.NAMES[:-1])
  after = names.index("GFLOPs") + 1
  names.insert(after, "images/s")
  yield "<!-- source: vit_jax/families/published.csv -->"
  yield ""
  yield f"| {' | '.join((*names, 'file'))} |"
  yield f"|---|{'---:|' * 7}---|---|"
  for row in rows:
    files = "<br>".join(
      f if f.startswith("pytorch_model") else f"`{f}`" for f in row.files
    )
    cells = (*row[:after], speeds.cell(row), *row[after:-1], files)
    yield f"| {' | '.join(cells)} |"


def best_table(speeds: Speeds) -> str:
  """Returns the table of the best model by cost."""
  return "\n".join(
    [
      "<!-- source: vit_jax/tools/scoring/published_scores.csv -->",
      "| up to, GFLOPs | top-1 | model | pixels | million | GFLOPs | images/s"
      " | file |",
      "|---:|---:|---|---:|---:|---:|---:|---|",
      *_best_rows(speeds),
    ]
  )


def page() -> str:
  """Returns docs/models.md with its tables made anew."""
  speeds = Speeds()
  made = {
    "best": lambda: best_table(speeds),
    "models": lambda: "\n".join(tables(speeds)),
  }
  return with_tables(PAGE.read_text(), made)


def main() -> None:
  """Writes list and page."""
  if "--speed" in sys.argv[1:]:
    measure()
  LIST.write_text(counted())
  published.rows.cache_clear()
  PAGE.write_text(page())


if __name__ == "__main__":
  main()

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

from vit_jax.families import ModelConfig, published
from vit_jax.tools import model_table
from vit_jax.tools.model_table import Cells

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
LIST = ROOT / "vit_jax/families/published.csv"
SPEEDS = ROOT / "docs/models_speed.jsonl"
TERMS = "https://ai.meta.com/resources/models-and-libraries/dinov3-license"
INDEX = published.https(published.AUGREG_INDEX)
NOTE = "<!-- Written by `python benchmarks/published_models.py`; change it. -->"

HEAD = f"""{NOTE}

# Which model?

The published weights that vit_jax reads. `vit-jax models` prints the same list.
A row without a file is a size that `--config.model.variant` knows, but of which
no weights are listed.
A name of the last column, without `*`, is what `vit_jax.load`, `--config.init`
and `vit-jax convert` take:

```py
vit = vit_jax.load("hf-hub:timm/deit3_small_patch16_384.fb_in22k_ft_in1k")
```

- *million*: parameters without a classifier. *GFLOPs*: forward pass of one
  image of *pixels* x *pixels*, two per multiply-add, counted by vit_jax.
  DINOv2's files of Meta and transformers, and DINOv3's of transformers, are
  loaded at 224 px, unless you pass `image_size=518` or `image_size=256`.
- *images/s*: measured, per second of processor time of one core, in float32 and
  batches of {{batch}} ({{machine}}, the other one busy; jax {{jax}}). Models
  above 400 GFLOPs were not measured.
- *classes*: outputs of the classifier that the file has.
- *top-1*, *k-NN*: **published** accuracy on ImageNet in percent. top-1 is that
  of the file's own classifier, unless the cell has another word. None was
  measured here.
- Series *SBB*: timm's models `vit_wee` to `vit_betwixt`. *DINOv3 SwiGLU*: the
  authors' S+.
- *licence*: as timm 1.0.31 states it. An empty cell is unknown.
- Models with
  [terms of their own]({TERMS}),
  such as DINOv3, also need an account that has agreed to them.
  `hf-hub:OWNER/NAME@REVISION` [pins a revision](weights.md#from-the-network).
- `*` is the rest of a name in [index.csv]({INDEX}).
  Download a `pytorch_model.bin` and its `config.json` by hand, and load their
  folder.
- [Weights](weights.md#how-equal-the-models-are) says how equal the outputs are
  to those of the original code.

"""
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


def page() -> str:
  """Returns docs/models.md."""
  speeds = Speeds()
  about = next(iter(speeds.rows.values()))
  lines = [
    "The highest top-1 in the tables below, by cost. An empty cell does not"
    " count: timm has published higher",
    "ones for some of these files, and for models that are not listed.",
    "",
    "<!-- source: vit_jax/tools/scoring/published_scores.csv -->",
    "",
    "| up to, GFLOPs | top-1 | model | pixels | million | GFLOPs | images/s"
    " | file |",
    "|---:|---:|---|---:|---:|---:|---:|---|",
    *_best_rows(speeds),
    *tables(speeds),
  ]
  head = HEAD.format(**about)
  return head + "\n".join(lines) + "\n"


def main() -> None:
  """Writes list and page."""
  if "--speed" in sys.argv[1:]:
    measure()
  LIST.write_text(counted())
  published.rows.cache_clear()
  PAGE.write_text(page())


if __name__ == "__main__":
  main()

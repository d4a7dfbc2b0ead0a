"""Estimates every config on common TPU slices, and writes docs/plans.md.

Run: python benchmarks/plans.py
It takes about three minutes a line on a CPU. Lines that the table already has
for the installed versions are not compiled again. Arguments: names of configs,
to plan only those.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "plans.md"
L16_384 = "finetune.py:model=L/16,dataset=imagenet2012,res=384"
B16_384 = "finetune.py:model=B/16,dataset=imagenet2012,res=384"
PLANS = (
  ("vit_b32.py:imagenet21k", "v5e:16x16"),
  ("vit_b16.py:imagenet21k", "v5e:16x16"),
  ("vit_l32.py:imagenet21k", "v5e:16x16"),
  ("vit_l16.py:imagenet21k", "v5e:16x16"),
  ("vit_h14.py:imagenet21k", "v5e:16x16"),
  ("vit_l16.py:imagenet21k", "v4:4x4x4"),
  ("vit_l16.py:imagenet21k", "v5p:4x4x4"),
  ("vit_l16.py:imagenet21k", "v6e:16x16"),
  ("vit_b16.py:imagenet2012", "v5e:4x4"),
  ("vit_b16.py:imagenet2012", "v6e:2x4"),
  (B16_384, "v5e:2x4"),
  (L16_384, "v5e:2x4"),
)
HEAD = """# What the recipes would cost: estimates

`vit-jax plan` for recipes on common slices, written by `python
benchmarks/plans.py` with {versions}.
None of this ran on a TPU: memory is the peak of a chip as XLA reports it, and
all other numbers are estimates, which no chip has confirmed. The time of a step
is estimated twice, by cycles and links, nothing overlapped, and by the
compiler's coarser roofline; the third number is their geometric mean, from
which the other columns follow. Hours are for all steps of the recipe, without
evaluation.

<!-- estimate: python benchmarks/plans.py -->

| config | slice | batch | GiB | estimate, ms | images/s | MFU | hours | \
chip-hours |
|---|---|---|---|---|---|---|---|---|
"""


def main(wanted: list[str]) -> None:
  """Compiles what the table lacks, and writes the table after each line."""
  packages = ("jax", "libtpu")
  versions = " and ".join(
    f"{p} {importlib.metadata.version(p)}" for p in packages
  )
  old = TABLE.read_text() if TABLE.exists() else ""
  rows = dict(read(old)) if versions in old else {}
  for config, topology in PLANS:
    if (config, topology) in rows or not any(w in config for w in wanted):
      continue
    command = [sys.executable, "-m", "vit_jax.plan", "--json"]
    command += [f"--config=configs/{config}", f"--topology={topology}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
      sys.exit(f"{config} on {topology}: {done.stderr}")
    rows[config, topology] = row(config, topology, json.loads(done.stdout))
    print(rows[config, topology], flush=True)
    text = HEAD.format(versions=versions)
    TABLE.write_text(text + "".join(rows[k] + "\n" for k in PLANS if k in rows))


def read(table: str):
  """Yields the rows of a table by config and slice."""
  for line in table.splitlines():
    cells = [cell.strip(" `") for cell in line.split("|")]
    if tuple(cells[1:3]) in PLANS:
      yield tuple(cells[1:3]), line


def row(config: str, topology: str, found: dict) -> str:
  """Returns a row of the table."""
  memory = f"{found['peak_bytes'] / 2**30:.2f}"
  cells = [f"`{config}`", topology, f"{found['batch_size']:,}"]
  if not found["fits"]:
    capacity = f"{found['capacity_bytes'] / 2**30:.2f}"
    cells += [f"{memory}: does not fit {capacity}", *"-----"]
  else:
    keys = ("cycles_seconds", "optimal_seconds", "price_seconds")
    cells += [
      memory,
      " / ".join(f"{1e3 * found[k]:.1f}" for k in keys),
      f"{found['images_per_second']:,.0f}",
      f"{100 * found['mfu']:.0f} %",
      f"{found['hours']:,.1f}",
      f"{found['chip_hours']:,.0f}",
    ]
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main(sys.argv[1:] or [""])

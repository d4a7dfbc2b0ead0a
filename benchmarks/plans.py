"""Estimates recipes on TPU slices, and writes docs/plans.md.

Run: python benchmarks/plans.py [parts of a config's name]
A plan takes two to four minutes of a CPU; two are compiled at a time. What
docs/plans.jsonl has for the installed versions is not compiled again; delete
its lines after a change of the step. With parts of names only what has one of
them is compiled. `--list` compiles nothing and writes the page anew.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plans.md"
FOUND = ROOT / "docs" / "plans.jsonl"
L16_384 = "finetune:model=L/16,dataset=imagenet2012,res=384"
L16_512 = "finetune:model=L/16,dataset=imagenet2012,res=512"
B16_384 = "finetune:model=B/16,dataset=imagenet2012,res=384"
SCAN = "--config.model.scan=true"
RECIPES = (
  ("vit_b32:imagenet21k", "v5e:16x16"),
  ("vit_b16:imagenet21k", "v5e:16x16"),
  ("vit_l32:imagenet21k", "v5e:16x16"),
  ("vit_l16:imagenet21k", "v5e:16x16"),
  ("vit_h14:imagenet21k", "v5e:16x16"),
  (f"vit_l16:imagenet21k {SCAN}", "v5e:16x16"),
  (f"vit_h14:imagenet21k {SCAN}", "v5e:16x16"),
  ("vit_l16:imagenet21k", "v4:4x4x4"),
  ("vit_l16:imagenet21k", "v5p:4x4x4"),
  ("vit_l16:imagenet21k", "v6e:16x16"),
  ("vit_l16:imagenet21k", "tpu7x:4x4x4"),
  ("vit_b16:imagenet2012", "v5e:4x4"),
  ("vit_b16:imagenet2012", "v6e:2x4"),
  (B16_384, "v5e:2x4"),
  (L16_384, "v5e:2x4"),
)
BATCH = "--config.data.batch_size="
V5E = ("v5e:2x4", "v5e:8x8", "v5e:16x16", "v5e:16x16,slices=4")
# What grows: title, the config and its options, slices from small to large.
SCALING = (
  ("S/16, 224 px, batch 1,024", "vit_s16", V5E[:3]),
  ("B/16, 224 px, batch 4,096", "vit_b16:imagenet21k", V5E),
  (
    "L/16, 224 px, batch 1,024",
    f"vit_l16:imagenet21k {BATCH}1024",
    V5E[:2],
  ),
  ("L/16, 224 px, batch 4,096, v5e", "vit_l16:imagenet21k", V5E),
  (
    "L/16, 224 px, batch 32,768",
    f"vit_l16:imagenet21k {BATCH}32768",
    V5E[2:],
  ),
  (
    "L/16, 224 px, batch 4,096, v5p",
    "vit_l16:imagenet21k",
    ("v5p:4x4x4", "v5p:8x8x16"),
  ),
  ("H/14, 224 px, batch 4,096", "vit_h14:imagenet21k", V5E[1:]),
  ("L/16, 384 px, batch 512", L16_384, V5E[:3]),
  ("L/16, 512 px, batch 512", L16_512, V5E[:2]),
)
KEPT = (
  "chips batch_size microbatches mesh peak_bytes capacity_bytes fits"
  " cycles_seconds optimal_seconds price_seconds link_seconds"
  " between_slices_seconds images_per_second mfu hours chip_hours"
).split()
HEAD = """# What the recipes would cost: estimates

`vit-jax plan` for recipes on common slices, written by `python
benchmarks/plans.py` with {versions}.
None of this ran on a TPU: memory is the peak of a chip (of TPU7x: of a core,
half a chip) as XLA reports it, and all other numbers are estimates, which no
chip has confirmed. The time of a step is estimated twice, by cycles and links,
nothing overlapped, and by a coarser roofline (docs/performance.md); the third
number is their geometric mean, from which the other columns follow. Hours are
for all steps of the recipe, without evaluation.

<!-- estimate: python benchmarks/plans.py -->

| config | slice | batch | GiB | estimate, ms | images/s | MFU | hours | \
chip-hours |
|---|---|---|---|---|---|---|---|---|
"""
SCALING_HEAD = """
## From 8 to 1,024 chips

The same batch on more chips. "Of the smallest" is images/s and chip, relative
to the first slice of the rows of that work. "Links" is the share of the first
estimate, cycles and links, that collectives take, and then the part of them
that passes between slices. 1,024 chips of v5e are four slices of 256 that the
data centre's network joins.

<!-- estimate: python benchmarks/plans.py -->

| work | slice | images a chip | GiB | estimate, ms | images/s and chip | \
of the smallest | links |
|---|---|---|---|---|---|---|---|
"""


def versions() -> str:
  packages = ("jax", "libtpu")
  return " and ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)


def known() -> dict[tuple[str, str], dict]:
  """Returns what was found with the installed versions."""
  if not FOUND.exists():
    return {}
  lines = map(json.loads, FOUND.read_text().splitlines())
  return {
    (x["config"], x["slice"]): x for x in lines if x["versions"] == versions()
  }


def compile_plan(config: str, topology: str) -> None:
  """Compiles one plan and adds its line to the file."""
  name, *options = config.split()
  command = [sys.executable, "-m", "vit_jax", "plan", "--json", *options]
  command += [f"--config={name}", f"--topology={topology}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"{config} on {topology}: {done.stderr}")
  found = json.loads(done.stdout)
  line = {"config": config, "slice": topology, "versions": versions()}
  line |= {key: found[key] for key in KEPT}
  with FOUND.open("a") as file:
    file.write(json.dumps(line) + "\n")
  print(config, topology, "done", flush=True)


def main(argv: list[str] | None = None) -> None:
  """Compiles what is not known, and writes the page."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("parts", nargs="*", metavar="PART")
  parser.add_argument("--list", action="store_true")
  args = parser.parse_args(argv)
  parts = args.parts or [""]
  pairs = [*RECIPES]
  pairs += [(config, s) for _, config, slices in SCALING for s in slices]
  missing = [
    (config, topology)
    for config, topology in dict.fromkeys(pairs)
    if (config, topology) not in known()
    and any(part in config for part in parts)
  ]
  if not args.list:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      for _ in pool.map(lambda pair: compile_plan(*pair), missing):
        PAGE.write_text(page())
  if not known():  # of other versions, whose page stays
    sys.exit(f"{FOUND}: has no plan with {versions()}; {PAGE} is as it was.")
  PAGE.write_text(page())


def page() -> str:
  """Returns the page from what is known."""
  found = known()
  lines = [recipe_row(*pair, found[pair]) for pair in RECIPES if pair in found]
  text = HEAD.format(versions=versions()) + "\n".join(lines) + "\n"
  lines = []
  for title, config, slices in SCALING:
    rows = [(s, found[config, s]) for s in slices if (config, s) in found]
    lines += [scaling_row(title, s, x, rows[0][1]) for s, x in rows]
  return text + SCALING_HEAD + "\n".join(lines) + "\n" + NOTES


def milliseconds(found: dict) -> str:
  keys = ("cycles_seconds", "optimal_seconds", "price_seconds")
  return " / ".join(f"{1e3 * found[k]:.1f}" for k in keys)


def memory(found: dict) -> str:
  peak = f"{found['peak_bytes'] / 2**30:.2f}"
  if found["fits"]:
    return peak
  return f"{peak}: does not fit {found['capacity_bytes'] / 2**30:.2f}"


def recipe_row(config: str, topology: str, found: dict) -> str:
  """Returns a row of the first table."""
  cells = [f"`{config}`", topology, f"{found['batch_size']:,}", memory(found)]
  if not found["fits"]:
    cells += "-----"
  else:
    cells += [
      milliseconds(found),
      f"{found['images_per_second']:,.0f}",
      f"{100 * found['mfu']:.0f} %",
      f"{found['hours']:,.1f}",
      f"{found['chip_hours']:,.0f}",
    ]
  return f"| {' | '.join(cells)} |"


def scaling_row(title: str, topology: str, found: dict, smallest: dict) -> str:
  """Returns a row of the second table."""
  per_chip = found["batch_size"] / found["chips"]
  cells = [title, topology, f"{per_chip:g}", memory(found)]
  if not found["fits"]:
    cells += "----"
  else:
    rate, best = (
      x["images_per_second"] / x["chips"] for x in (found, smallest)
    )
    links = f"{100 * found['link_seconds'] / found['cycles_seconds']:.0f} %"
    if found["between_slices_seconds"]:
      between = found["between_slices_seconds"] / found["cycles_seconds"]
      links += f", {100 * between:.0f} % between slices"
    cells += [milliseconds(found), f"{rate:,.0f}", f"{rate / best:.2f}", links]
  return f"| {' | '.join(cells)} |"


NOTES = """
The rate of a chip falls below 85 % of the smallest slice's only where it has 4
images, or at 384 px 2. Of L/16 with batch 4,096 on 1,024 chips of v5e, a step
then takes 0.48 of the cycles of 16 images without the links (26.2 and 54.5 ms),
since what a chip does with the weights does not shrink with the images: casts,
gradients, the optimizer. The links take 10.5 ms instead of 7.2; 3.1 of them
pass between slices. Take 16 images a chip, or 8 at 384 and 512 px, where 0.88
or more remain, or a larger batch: with 32,768 images the same 1,024 chips reach
0.90. The mesh is the recipes' own everywhere: the state split over 16 chips (8
on a slice of 8), and copies of it along the others. No other mesh that was
tried brings a chip with 4 or 2 images back to 0.85: with the state split over
64 chips a step of L/16 takes 0.95 of the time on 1,024 chips of v5e, one of
B/16 or H/14 more time than now (benchmarks/notes/performance_log.md).
"""

if __name__ == "__main__":
  main()

"""Estimates recipes on TPU slices, and writes benchmarks/notes/plans.md.

Run: python benchmarks/plans.py [parts of a config's name]
A plan takes one to four minutes of a core. A plan that docs/plans.jsonl has for
the installed versions is not compiled again; use `--again` after a change of
the step. With parts of names, only configs with such a name are compiled.
`--list` only writes the page.

`--check` compiles the rows of `CHECKED` again. It fails if an estimated time is
more than 3 % above the lowest one in docs/plans.jsonl with the installed
versions. A lower one takes its place. Commit the file together with the change
of the step.
"""

import argparse
import importlib.metadata
import json
import pathlib
import subprocess
import sys

from tables import with_tables

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "notes" / "plans.md"
PLANS = ROOT / "docs" / "plans.jsonl"
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
L16_384_SCAN = f"{L16_384} {SCAN} --config.optim.name=adamw"
DINOV3 = (
  " --config.model.name=modern --config.model.registers=4"
  " --config.model.rope=dinov3 --config.model.posemb=none"
  " --config.model.layer_scale=1e-5 --config.model.qkv_bias=no_key"
  " --config.model.gelu=erf --config.model.ln_eps=1e-5"
)
# What `--check` estimates: title, config and options, slice. Together they take
# less than an hour of a core; a scan compiles in a third of the time of a loop.
CHECKED = (
  ("S/16", "vit_s16", "v5e:2x4"),
  ("B/16", "vit_b16:imagenet21k", "v5e:2x4"),
  ("B/16", "vit_b16:imagenet21k", "v5e:16x16"),
  ("B/16", "vit_b16:imagenet2012", "v6e:2x4"),
  ("B/16, 384 px", B16_384, "v5e:2x4"),
  ("L/16", f"vit_l16:imagenet21k {BATCH}1024", "v5e:2x4"),
  ("L/16", "vit_l16:imagenet21k", "v5e:16x16"),
  ("L/16, scan", f"vit_l16:imagenet21k {BATCH}1024 {SCAN}", "v6e:2x4"),
  ("L/16", "vit_l16:imagenet21k", "v6e:16x16"),
  ("L/16", "vit_l16:imagenet21k", "v4:4x4x4"),
  ("L/16", "vit_l16:imagenet21k", "v5p:4x4x4"),
  ("L/16", "vit_l16:imagenet21k", "tpu7x:4x4x4"),
  ("L/16, 384 px", L16_384, "v5e:2x4"),
  ("L/16, 384 px", L16_384, "v5e:16x16"),
  ("L/16, 512 px", L16_512, "v5e:8x8"),
  ("H/14", "vit_h14:imagenet21k", "v5e:16x16"),
  ("H/14, scan", f"vit_h14:imagenet21k {SCAN}", "v5e:16x16"),
  ("H/14", f"vit_h14:imagenet21k {BATCH}512", "v4:2x4x4"),
  (
    "L/16, 384 px, LoRA, scan",
    f"{L16_384_SCAN} --config.lora.rank=16",
    "v5e:2x4",
  ),
  ("DINOv3-L, 384 px, scan", f"{L16_384_SCAN}{DINOV3}", "v5e:2x4"),
)
MOST = 1.03  # times the lowest estimate
COLUMNS = (
  "chips batch_size microbatches mesh peak_bytes capacity_bytes fits"
  " cycles_seconds optimal_seconds price_seconds link_seconds"
  " between_slices_seconds images_per_second mfu hours chip_hours"
).split()


def versions() -> str:
  packages = ("jax", "libtpu")
  return " and ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)


def stored() -> list[dict]:
  """Returns the plans, with any versions."""
  return list(map(json.loads, PLANS.read_text().splitlines()))


def known() -> dict[tuple[str, str], dict]:
  """Returns the plans with the installed versions."""
  return {
    (x["config"], x["slice"]): x
    for x in stored()
    if x["versions"] == versions()
  }


def best(plan: dict) -> float | None:
  """Returns the lowest estimate of a row so far, s; None: it never fitted."""
  times = (plan.get("best_seconds"), plan["price_seconds"])
  return min((t for t in times if t), default=None)


def compile_plan(config: str, topology: str) -> dict:
  """Compiles one plan, and puts its line in the place of an earlier one."""
  name, *options = config.split()
  command = [sys.executable, "-m", "vit_jax", "plan", "--json", *options]
  command += [f"--config={name}", f"--topology={topology}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"{config} on {topology}: {done.stderr}")
  plan = json.loads(done.stdout)
  line = {"config": config, "slice": topology, "versions": versions()}
  line |= {key: plan[key] for key in COLUMNS}
  replace(line)
  return line


def replace(line: dict) -> None:
  """Writes a line in the place of an earlier one, whose best it keeps."""
  rows = {(x["config"], x["slice"], x["versions"]): x for x in stored()}
  key = line["config"], line["slice"], line["versions"]
  before = best(rows[key]) if key in rows else None
  if before and before < (line["price_seconds"] or float("inf")):
    line["best_seconds"] = before
  rows[key] = line
  PLANS.write_text("".join(json.dumps(x) + "\n" for x in rows.values()))


def check(parts: list[str]) -> None:
  """Estimates the rows of `CHECKED`, and fails if one is above its best.

  Args:
    parts: Only rows whose config has one of these.

  Raises:
    SystemExit: A row does not fit, or takes more than `MOST` times its best.
  """
  before, errors, new = known(), [], []
  rows = [row for row in CHECKED if any(part in row[1] for part in parts)]
  print(
    f"{len(rows)} rows with {versions()}; ms: estimate, best, ratio", flush=True
  )
  for title, config, topology in rows:
    seconds = compile_plan(config, topology)["price_seconds"]
    lowest = best(before.get((config, topology), {"price_seconds": None}))
    text = f"{title}, {topology}"
    if seconds is None:
      errors.append(f"{text}: does not fit")
    elif lowest is None:
      new.append(text)
      print(f"{text}: {1e3 * seconds:.1f}, no committed estimate", flush=True)
    else:
      ratio = seconds / lowest
      line = f"{1e3 * seconds:.1f}, {1e3 * lowest:.1f}, {ratio:.3f}"
      print(f"{text}: {line}", flush=True)
      if ratio > MOST:
        errors.append(f"{text} ({config}): {line}")
  write_page()
  if new:
    others = sorted({x["versions"] for x in stored()} - {versions()})
    print(
      f"{len(new)} rows have no committed estimate with {versions()}:"
      f" {'; '.join(new)}. {PLANS} also has: {', '.join(others) or 'none'}."
    )
  if errors:
    most = f"{100 * (MOST - 1):.0f} %"
    errors.insert(0, f"estimates of more than {most} above the best:")
    sys.exit("\n  ".join(errors))


def main(argv: list[str] | None = None) -> None:
  """Compiles what is not known, and writes the page."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("parts", nargs="*", metavar="PART")
  for flag in ("--list", "--again", "--check"):
    parser.add_argument(flag, action="store_true")
  args = parser.parse_args(argv)
  parts = args.parts or [""]
  if args.check:
    return check(parts)
  pairs = [*RECIPES]
  pairs += [(config, s) for _, config, slices in SCALING for s in slices]
  for config, topology in dict.fromkeys(pairs):
    is_known = (config, topology) in known() and not args.again
    if not args.list and not is_known and any(p in config for p in parts):
      compile_plan(config, topology)
      print(config, topology, "done", flush=True)
      write_page()
  if not known():  # of other versions, whose page stays
    sys.exit(f"{PLANS}: has no plan with {versions()}; {PAGE} is as it was.")
  write_page()


def recipes() -> str:
  """Returns the first table of the page."""
  plans = known()
  return markdown(
    "config, slice, batch, GiB, estimate (ms), images/s, MFU, hours,"
    " chip-hours",
    [recipe_row(*pair, plans[pair]) for pair in RECIPES if pair in plans],
  )


def scaling() -> str:
  """Returns the second table."""
  plans, lines = known(), []
  for title, config, slices in SCALING:
    rows = [(s, plans[config, s]) for s in slices if (config, s) in plans]
    lines += [scaling_row(title, s, x, rows[0][1]) for s, x in rows]
  return markdown(
    "work, slice, images a chip, GiB, estimate (ms), images/s and chip,"
    " of the smallest, links",
    lines,
  )


def checked() -> str:
  """Returns the third table."""
  plans = known()
  return markdown(
    "work, slice, images a chip, GiB, estimate (ms), of the best",
    [
      checked_row(title, s, plans[config, s])
      for title, config, s in CHECKED
      if (config, s) in plans
    ],
  )


def markdown(names: str, rows: list[str]) -> str:
  """Returns a table."""
  columns = names.split(", ")
  rule = "---|" * len(columns)
  lines = [f"| {' | '.join(columns)} |", f"|{rule}", *rows]
  return "\n".join(("<!-- estimate: python benchmarks/plans.py -->", *lines))


TABLES = {
  "versions": lambda: f"Versions: {versions()}.",
  "recipes": recipes,
  "scaling": scaling,
  "checked": checked,
}


def write_page() -> None:
  """Writes the tables of the page anew."""
  PAGE.write_text(with_tables(PAGE.read_text(), TABLES))


def milliseconds(plan: dict) -> str:
  keys = ("cycles_seconds", "optimal_seconds", "price_seconds")
  return " / ".join(f"{1e3 * plan[k]:.1f}" for k in keys)


def memory(plan: dict) -> str:
  peak = f"{plan['peak_bytes'] / 2**30:.2f}"
  if plan["fits"]:
    return peak
  return f"{peak}: does not fit {plan['capacity_bytes'] / 2**30:.2f}"


def recipe_row(config: str, topology: str, plan: dict) -> str:
  """Returns a row of the first table."""
  cells = [f"`{config}`", topology, f"{plan['batch_size']:,}", memory(plan)]
  if not plan["fits"]:
    cells += "-----"
  else:
    cells += [
      milliseconds(plan),
      f"{plan['images_per_second']:,.0f}",
      f"{100 * plan['mfu']:.0f} %",
      f"{plan['hours']:,.1f}",
      f"{plan['chip_hours']:,.0f}",
    ]
  return f"| {' | '.join(cells)} |"


def scaling_row(title: str, topology: str, plan: dict, smallest: dict) -> str:
  """Returns a row of the second table."""
  per_chip = plan["batch_size"] / plan["chips"]
  cells = [title, topology, f"{per_chip:g}", memory(plan)]
  if not plan["fits"]:
    cells += "----"
  else:
    rate = plan["images_per_second"] / plan["chips"]
    ratio = "-"
    if smallest["fits"]:
      first = smallest["images_per_second"] / smallest["chips"]
      ratio = f"{rate / first:.2f}"
    links = f"{100 * plan['link_seconds'] / plan['cycles_seconds']:.0f} %"
    if plan["between_slices_seconds"]:
      between = plan["between_slices_seconds"] / plan["cycles_seconds"]
      links += f", {100 * between:.0f} % between slices"
    cells += [milliseconds(plan), f"{rate:,.0f}", ratio, links]
  return f"| {' | '.join(cells)} |"


def checked_row(title: str, topology: str, plan: dict) -> str:
  """Returns a row of the third table."""
  per_chip = plan["batch_size"] / plan["chips"]
  cells = [title, topology, f"{per_chip:g}", memory(plan)]
  if not plan["fits"]:
    cells += "--"
  else:
    ratio = plan["price_seconds"] / best(plan)
    cells += [milliseconds(plan), f"{ratio:.2f}"]
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main()

"""Facts of a run, and what it cost, in words."""

import statistics
from typing import Any

from vit_jax.callbacks import accounting
from vit_jax.callbacks.progress import format_seconds
from vit_jax.checkpointing import resume_rules
from vit_jax.options import shown
from vit_jax.reporting.runs import Run

MOST_CHANGES = 5  # of a config, one by one


def facts(run: Run) -> dict[str, str]:
  """Returns the facts of a run, by the names that the table shows."""
  config, metadata = run.config, run.metadata
  found = {}
  if model := config.get("model"):
    more = [
      f"{key.replace('_dim', ' width').replace('num_', '')} {model[key]}"
      for key in ("width", "depth", "mlp_dim", "num_heads")
      if model.get(key) is not None
    ]
    found["model"] = ", ".join([model.get("variant") or "", *more])
  if metadata.get("num_params"):
    found["parameters"] = f"{metadata['num_params']:,}"
  if objective := config.get("objective"):
    words = [objective.get("kind"), *objective.values()]
    words = dict.fromkeys(w for w in words if isinstance(w, str))
    found["objective"] = ", ".join(words).replace("_", " ")
  if config:
    found["starts from"] = str(config.get("init") or "random weights")
  if before := (run.metadata.get(accounting.KEY) or {}).get("init"):
    found["the run before"] = accounting.cost_text(before)
  if data := config.get("data"):
    fake = ", fake" * run.is_fake
    found["data"] = f"{data.get('dataset')} [{data.get('split')}]{fake}"
    if metadata.get("data_given"):
      found["data"] = run.dataset
    if metadata.get("num_examples"):
      found["images"] = f"{metadata['num_examples']:,}"
  if size := metadata.get("image_size"):
    found["image size"] = " × ".join(map(str, size)) + " px"
  if grid := metadata.get("grid"):
    found["patches"] = " × ".join(map(str, grid))
  if run.rows:
    total = config.get("total_steps")
    of = f" of {total:,}" if total and total != run.steps else ""
    found["steps"] = f"{run.steps:,}{of}"
  if (data := config.get("data")) and data.get("batch_size"):
    found["batch"] = f"{data['batch_size']:,}"
  if optim := config.get("optim"):
    lr = optim.get("lr")
    peak = "" if lr is None else f", peak lr {lr:g}"
    found["optimizer"] = f"{optim.get('name')}{peak}"
  if text := changed(metadata.get("changes")):
    found["changed on the way"] = text
  if metadata.get("devices"):
    found["devices"] = str(metadata["devices"])
  return found


def changed(trail: list[dict[str, Any]] | None) -> str:
  """Returns the changes that a run took where it resumed, see `changes.trail`.

  Example:
    >>> change = {"step": 8, "key": "optim.lr", "from": 1, "to": 0.1}
    >>> changed([{**change, "by": "--allow_change"}])
    'step 8: optim.lr 1 to 0.1 (allowed)'
  """
  trail = trail or []
  parts = [
    f"step {x.get('step') or 0:,}: {x.get('key')} {shown(x.get('from'))} to"
    f" {shown(x.get('to'))}" + " (allowed)" * (x.get("by") == resume_rules.FLAG)
    for x in trail[:MOST_CHANGES]
  ]
  more = len(trail) - MOST_CHANGES
  return "; ".join(parts) + f"; and {more:,} more" * (more > 0)


def costs(run: Run) -> dict[str, float | None]:
  """Returns what a run cost, by the names that the table shows.

  The rates are medians over the lines of the run; None: not measured.
  """
  of = lambda name: run.series(f"train/{name}")[1]
  median = lambda values: statistics.median(values) if values else None
  return {
    "images seen": run.last("train/images_seen"),
    "exaFLOPs": run.last("train/exaflops"),
    "device-hours": run.device_hours,
    "wall seconds": run.wall_seconds(),
    "images/s": median(of("images_per_second")),
    "MFU": median(of("mfu")),
    "peak bytes": max(of("peak_bytes"), default=None),
  }


def cost_texts(run: Run) -> dict[str, str]:
  """Returns `costs` in words, without what was not measured."""
  texts = {
    "wall seconds": ("wall time", format_seconds),
    "MFU": ("MFU", lambda v: f"{100 * v:.1f}%"),
    "peak bytes": ("memory", lambda v: f"{v / 2**30:.2f} GiB a device"),
  }
  found = {}
  for what, value in costs(run).items():
    if value is not None:
      name, text = texts.get(what, (what, accounting.number))
      found[name] = text(value)
  return found

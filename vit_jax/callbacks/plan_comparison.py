"""What `vit-jax plan --workdir=RUN` promised of a run, and what it measured.

Both are in `plan.json` in the folder of the run: the plan with the config that
was planned; and from the end of the run on, what was measured.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax.config import Config, flat, json_file, options_of, to_dict
from vit_jax.devices import CHIPS

FILE = "plan.json"
# What is read of config.json, and of plan.json; see `json_file.faults`.
CONFIG = {
  "total_steps": int,
  "total_epochs": float,
  "init": str,
  "model": {
    "variant": str,
    "width": int,
    "depth": int,
    "mlp_dim": int,
    "num_heads": int,
  },
  "objective": {"kind": str},
  "data": {"dataset": str, "split": str, "batch_size": int},
  "optim": {"name": str, "lr": float},
  "evals": {str: {"kind": str}},
}
_NUMBERS = (
  "price price_seconds price_per_chip_hour images_per_second peak_bytes mfu"
)
SHAPE = {
  "plan": {
    "topology": str,
    "chips": int,
    "steps": int,
    "price_unit": str,
    **dict.fromkeys(_NUMBERS.split(), float),
  },
  "config": CONFIG,
}
# Options that do not change a training step, by the first parts of their path.
BESIDE = (
  "seed init fake_data fewshot log_steps trackers evals checkpoint limits"
  " on_nonfinite max_skipped data.data_dir data.shuffle_buffer"
).split()


class Kept(NamedTuple):
  """A promise beside its measurement; None: not estimated, or not measured."""

  what: str
  unit: str
  promised: int | float | None
  measured: int | float | None

  @property
  def ratio(self) -> float | None:
    """Measured over promised."""
    if not self.promised or self.measured is None:
      return None
    return self.measured / self.promised


def contents(config: Config, plan: dict[str, Any]) -> dict[str, Any]:
  """Returns what `plan.json` holds before the run.

  Args:
    config: As it was planned.
    plan: What `vit_jax.commands.plan.plan` returned.
  """
  return {"plan": plan, "config": to_dict(config), "measured": None}


def read(workdir: str) -> dict[str, Any]:
  """Returns the contents of `plan.json`; {} if the run was not planned.

  Raises:
    ValueError: The file is not one that the planner wrote.
  """
  path = epath.Path(workdir) / FILE
  if not path.exists():
    return {}
  try:
    found = json_file.read(path, SHAPE)
    needed = found["plan"]["topology"], found["plan"]["chips"]
    if None in (*needed, found["config"]["data"]):
      raise ValueError("no topology, chips or data")
  except (KeyError, TypeError, ValueError) as e:
    raise ValueError(
      f"{path}: expected what vit-jax plan --workdir={workdir} writes, got"
      f" {type(e).__name__}: {e}. Plan again, or delete it."
    ) from None
  return found


def differences(planned: dict[str, Any], config: Config) -> list[str]:
  """Returns how a run differs from the one that was planned, a text each.

  Args:
    planned: The config that was planned, as `to_dict` made it.
    config: That of the run.
  """
  old, new = options_of(planned), flat(to_dict(config))
  return [
    f"config.{key} was {old.get(key)!r}, is now {new.get(key)!r}"
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key)
    and not any(f"{key}.".startswith(f"{name}.") for name in BESIDE)
  ]


def lines(workdir: str, config: Config, num_devices: int) -> list[str]:
  """Returns lines for the start of a run: the promise, and what differs."""
  try:
    found = read(workdir)
  except ValueError as e:
    return [f"plan        not read: {e}"]
  if not found:
    return []
  plan = found["plan"]
  said = [
    f"{text(x.promised, x.unit)} {x.what}"
    for x in compare(plan, {}, plan.get("steps"))
    if x.promised is not None
  ]
  if plan.get("price") is not None:
    said.append(f"{text(plan['price'], '')} {plan['price_unit']}".rstrip())
  first = f"plan        for {plan['topology']}: {', '.join(said)}; estimates"
  others = differences(found["config"], config)
  if plan["chips"] != num_devices * chip_share(plan):
    others.append(
      f"it is for {plan['chips']} chips, the run has {num_devices}"
      f" device{'s' * (num_devices != 1)}"
    )
  return [first, *(f"            not as planned: {x}" for x in others)]


def measured(
  rows: Sequence[dict[str, Any]], batch_size: int
) -> dict[str, float]:
  """Returns medians of the rates, and the last sums, of a run's metrics.

  Args:
    rows: Lines of metrics.jsonl.
    batch_size: Images per step, over all devices.

  Returns:
    Those that were measured of: step_seconds, images_per_second, mfu,
    peak_bytes (the most of a device of process 0), device_hours, steps (for
    which the hours are).
  """
  series = {
    name: [r[f"train/{name}"] for r in rows if f"train/{name}" in r]
    for name in ("images_per_second", "mfu", "peak_bytes", "device_hours")
  }
  found = {
    name: statistics.median(series[name])
    for name in ("images_per_second", "mfu")
    if series[name]
  }
  if found.get("images_per_second"):
    found["step_seconds"] = batch_size / found["images_per_second"]
  if series["peak_bytes"]:
    found["peak_bytes"] = max(series["peak_bytes"])
  if series["device_hours"]:
    found["device_hours"] = series["device_hours"][-1]
    found["steps"] = max(r["step"] for r in rows)
  return found


def chip_share(plan: dict[str, Any]) -> float:
  """Returns the share of a chip that is a device of jax, see `Chip`."""
  chip = CHIPS.get(plan["topology"].split(":")[0])
  return chip.share if chip else 1.0


def compare(
  plan: dict[str, Any], found: dict[str, float], steps: int | None
) -> list[Kept]:
  """Returns each promise beside what was measured.

  The chip-hours are those of the steps that were done. They are promised for
  the steps alone; measured with compiling, evaluations and checkpoints.

  Args:
    plan: What `vit_jax.commands.plan.plan` returned.
    found: As `measured` returns it.
    steps: How many were done; None: unknown.
  """
  second = plan.get("price_seconds")
  hours = second and steps and second * steps * plan["chips"] / 3600
  spent = found.get("device_hours")
  share = chip_share(plan)
  spent = None if spent is None else spent * share
  device = "a chip" if share == 1 else "a core"
  of_steps = f"chip-hours for {steps:,} steps" if steps else "chip-hours"
  return [
    Kept("a step", "s", second, found.get("step_seconds")),
    Kept(
      "images/s",
      "",
      plan.get("images_per_second"),
      found.get("images_per_second"),
    ),
    Kept(device, "bytes", plan.get("peak_bytes"), found.get("peak_bytes")),
    Kept("MFU", "%", plan.get("mfu"), found.get("mfu")),
    Kept(of_steps, "", hours, spent),
  ]


def text(value: int | float | None, unit: str) -> str:
  """Returns a number of `Kept` in words.

  Example:
    >>> text(0.0206, "s"), text(2**30, "bytes"), text(0.25, "%")
    ('20.6 ms', '1.00 GiB', '25.0 %')
    >>> text(12345.6, ""), text(0.123456, ""), text(None, "s")
    ('12,346', '0.123', '—')
  """
  if value is None:
    return "—"
  if unit == "s":
    return f"{1e3 * value:,.1f} ms"
  if unit == "bytes":
    return f"{value / 2**30:,.2f} GiB"
  if unit == "%":
    return f"{100 * value:.1f} %"
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def kept(workdir: str, batch_size: int) -> str | None:
  """Writes what a run measured into its `plan.json`, and returns lines on it.

  Returns:
    None if it was not planned. All processes may call it, process 0 writes.
  """
  from vit_jax.writers import (  # which import this module
    metric_writer,
    run_info,
  )

  try:
    found = read(workdir)
  except ValueError:
    return None  # as the start of the run said
  if not found:
    return None
  values = measured(metric_writer.read_metrics(workdir), batch_size)
  run_info.write_json(workdir, FILE, {**found, "measured": values})
  said = [
    f"{text(x.measured, x.unit)} {x.what} ({x.ratio:.3g} x the plan)"
    for x in compare(found["plan"], values, values.get("steps"))
    if x.ratio is not None
  ]
  topology = found["plan"]["topology"]
  return f"plan        of {topology}; measured: {', '.join(said) or 'nothing'}"

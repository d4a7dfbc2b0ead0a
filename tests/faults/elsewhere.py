"""A run goes on on other devices, meshes, processes, and in another form."""

import pathlib
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faults import runs
from faults.trial import Trial

SMALL = "tests/checkpointing/test_other_mesh.py"
FROM = 28  # step of the checkpoint


class Place(NamedTuple):
  """Where a run goes on: devices, processes, options."""

  devices: int = 1
  processes: int = 1
  options: Sequence[str] = ()

  def __str__(self):
    options = [w.removeprefix("--config.") for w in self.options]
    many = f"{self.devices} device{'s' * (self.devices > 1)}"
    if self.processes > 1:
      many = f"{self.processes} processes"
    return " ".join([many, *options])


EIGHT = Place(8, options=["--config.mesh.fsdp=4"])
DEVICES = (
  Place(1),
  Place(2, options=["--config.mesh.fsdp=2"]),
  Place(4, options=["--config.mesh.tensor=2"]),
  Place(8, options=["--config.mesh.tensor=4"]),
  Place(8, options=["--config.model.scan=true", "--config.mesh.fsdp=2"]),
)
BACK = (Place(2, options=["--config.model.scan=false"]),)
SCAN = Place(2, options=["--config.model.scan=true"])
PROCESSES = tuple(Place(processes=n) for n in (1, 3, 4))


def devices(folder: pathlib.Path, seed: int) -> str:
  del seed  # nothing is random
  first = _moved(folder, EIGHT, DEVICES)
  return f"{first}; {_moved(folder, SCAN, BACK)}"


def processes(folder: pathlib.Path, seed: int) -> str:
  del seed
  return _moved(folder, Place(processes=2), PROCESSES)


def _moved(folder: pathlib.Path, place: Place, others: Sequence[Place]) -> str:
  """Runs at a place to its end, and from the middle at others."""
  config, want = runs.write_config(folder, steps=42), folder / f"{place}"
  keep = f"--config.checkpoint.keep_every_steps={FROM}"
  _run(config, want, place, [keep])
  largest = 0.0
  for other in others:
    workdir = folder / f"{place}, {other}"
    shutil.copytree(want, workdir)
    for path in (workdir / "checkpoints").iterdir():
      if path.name.isdigit() and int(path.name) > FROM:
        shutil.rmtree(path)
    _run(config, workdir, other)
    largest = max(largest, difference(runs.rows(want), runs.rows(workdir)))
  assert largest < 1e-5, f"losses differ by {largest:.1e} of themselves"
  others_text = ", ".join(map(str, others))
  return f"{place} to {others_text}: losses within {largest:.1e}"


def _run(config, workdir, place, options=()):
  flags = f"--xla_force_host_platform_device_count={place.devices}"
  env = {"XLA_FLAGS": flags} if place.devices > 1 else {}
  started = runs.start(
    config, workdir, [*place.options, *options], place.processes, env
  )
  codes = runs.finish(started, 300)
  assert not any(codes), f"{place}: {codes}\n{runs.output(workdir)}"


def difference(want: Sequence[dict], got: Sequence[dict]) -> float:
  """Returns the largest relative difference of the losses of two runs.

  Raises:
    AssertionError: They have other rows.
  """
  a, b = (
    {(r["step"], k): v for r in rows for k, v in r.items() if "loss" in k}
    for rows in (want, got)
  )
  assert a.keys() == b.keys(), f"other rows: {a.keys() ^ b.keys()}"
  return max(float(np.abs(a[k] - b[k]) / np.abs(a[k])) for k in a)


GUARANTEE = (
  "A run goes on {}: the same batches, and losses within 1e-5 of those of a run"
  " that stayed where it was."
)
TRIALS = (
  Trial(
    "elsewhere.devices",
    GUARANTEE.format(
      "on fewer devices, on another mesh, and with its blocks in a scan or back"
      " in a loop"
    ),
    devices,
    SMALL,
    seconds=150,
  ),
  Trial(
    "elsewhere.processes",
    GUARANTEE.format("on another number of processes"),
    processes,
    SMALL,
    seconds=120,
  ),
)

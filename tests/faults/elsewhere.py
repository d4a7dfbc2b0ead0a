"""A run goes on on other devices, on another mesh, and in another form.

tests/distributed/test_two_processes.py has other numbers of processes.
"""

import pathlib
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from faults import runs
from faults.trial import trial

FROM = 28  # step of the checkpoint


class Place(NamedTuple):
  """Where a run goes on: the number of devices, and options."""

  devices: int
  options: Sequence[str] = ()

  def __str__(self):
    unit = "devices" if self.devices > 1 else "device"
    options = [word.removeprefix("--config.") for word in self.options]
    return " ".join([str(self.devices), unit, *options])


MOVES = {
  Place(8, ("--config.mesh.fsdp=4",)): (
    Place(1),
    Place(2, ("--config.mesh.fsdp=2",)),
    Place(4, ("--config.mesh.tensor=2",)),
    Place(8, ("--config.mesh.tensor=4",)),
    Place(8, ("--config.model.scan=true", "--config.mesh.fsdp=2")),
  ),
  Place(2, ("--config.model.scan=true",)): (
    Place(2, ("--config.model.scan=false",)),
  ),
}


@trial(
  "A run goes on on fewer devices, on another mesh, and with its blocks in a"
  " scan or back in a loop: the same batches, and losses within 1e-5 of those"
  " of a run that stayed where it was.",
  seconds=150,
)
def devices(folder: pathlib.Path, seed: int) -> str:
  del seed  # nothing is random
  config, texts = runs.write_config(folder, steps=42), []
  for place, others in MOVES.items():
    want, largest = folder / f"{place}", 0.0
    _run(config, want, place, f"--config.checkpoint.keep_every_steps={FROM}")
    for other in others:
      workdir = shutil.copytree(want, folder / f"{place}, {other}")
      for path in (workdir / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > FROM:
          shutil.rmtree(path)
      _run(config, workdir, other)
      largest = max(largest, _difference(runs.rows(want), runs.rows(workdir)))
    assert largest < 1e-5, f"losses differ by {largest:.1e} of themselves"
    to = ", ".join(map(str, others))
    texts.append(f"{place} to {to}: losses within {largest:.1e}")
  return "; ".join(texts)


def _run(config, workdir, place, *options):
  flags = f"--xla_force_host_platform_device_count={place.devices}"
  env = {"XLA_FLAGS": flags} if place.devices > 1 else {}
  started = runs.start(config, workdir, [*place.options, *options], env=env)
  codes = runs.finish(started, 300)
  assert not any(codes), f"{place}: {codes}\n{runs.output(workdir)}"


def _difference(want: Sequence[dict], got: Sequence[dict]) -> float:
  """Returns the largest relative difference of the losses of two runs.

  Raises:
    AssertionError: They have other rows.
  """
  a, b = (
    {(r["step"], k): v for r in rows for k, v in r.items() if "loss" in k}
    for rows in (want, got)
  )
  assert a.keys() == b.keys(), f"other rows: {a.keys() ^ b.keys()}"
  return max(abs(a[k] - b[k]) / abs(a[k]) for k in a)

"""A step that is not finite in one of two processes."""

import pathlib
import random

from faults import runs
from faults.trial import trial

STEPS, EVERY = 40, 7  # of a run, and between its checkpoints


def _assert_checkpoints_are_finite(workdir: pathlib.Path, bad: int) -> None:
  """Checks every checkpoint of a run: all are of steps before the bad one."""
  import jax
  import numpy as np

  from vit_jax.checkpointing import checkpointer

  for folder in (workdir / "checkpoints").glob("[0-9]*"):
    assert folder.name.isdigit() and int(folder.name) < bad, folder
    params, _ = checkpointer.load_params(str(folder))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params)), folder


@trial(
  "A step whose loss is not finite, since one of two processes read what spoils"
  " it, changes nothing in either, is never saved, and is reported with its"
  " records.",
  seconds=100,
)
def two_processes(folder: pathlib.Path, seed: int) -> str:
  from vit_jax.callbacks import nonfinite as nonfinite_lib

  rng = random.Random(seed)
  config = runs.write_config(folder, STEPS)
  options = ["--config.objective.loss=sigmoid"]

  def run(name: str, act: str, *more: str) -> tuple[list[int], int]:
    who = rng.randrange(2)
    acts = {who: ["batches", act], 1 - who: ["batches", "nothing"]}
    started = runs.start(config, folder / name, [*options, *more], 2, acts=acts)
    return runs.finish(started, 300), who

  codes, _ = run("plain", "nothing")
  assert codes == [0, 0], runs.output(folder / "plain")
  bad = rng.randrange(EVERY + 1, STEPS)
  codes, who = run("stop", f"nan:{bad}")
  for i in range(2):
    output = runs.output(folder / "stop", i)
    assert codes == [1, 1], f"{codes}\n{output}"
    assert f"at step {bad}: its update was not applied" in output, output
  _assert_checkpoints_are_finite(folder / "stop", bad)
  (entry,) = nonfinite_lib.read(str(folder / "stop"))
  assert len({n for rows in entry["records"] for n in rows}) == 24, entry
  stopped = f"stopped both at step {bad} by a label of process {who}"

  skipped = sorted(rng.sample(range(2, STEPS), 3))
  codes, who = run(
    "skip", f"nan:{','.join(map(str, skipped))}", "--config.on_nonfinite=skip"
  )
  assert codes == [0, 0], runs.output(folder / "skip")
  entries = nonfinite_lib.read(str(folder / "skip"))
  assert [entry["step"] for entry in entries] == skipped, entries
  steps = ", ".join(map(str, skipped))
  return f"{stopped}; skipped steps {steps} of process {who}"

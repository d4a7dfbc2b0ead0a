"""Non-finite steps, and runs that diverge from each other."""

import contextlib
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

from faults import runs
from faults.trial import Trial

STEPS, EVERY = 40, 7  # of a run, and between its checkpoints
Change = Callable[[int, dict], None]  # (step, its batch), changed in place


class Noise:
  """Random images of 10 classes; `change` sees every batch.

  Labels are a number per class, so that one can be none.
  """

  num_examples, num_classes, class_names = 2400, 10, None
  is_multilabel = True

  def __init__(self, change: Change = lambda step, batch: None):
    self._change = change

  def batches(self, start_step, process_index, process_count):
    import numpy as np

    step = start_step
    while True:
      rng = np.random.default_rng(step)
      label = rng.integers(0, 10, 24)
      noise = rng.integers(0, 40, (24, 16, 16, 3))
      batch = {
        "image": (noise + 20 * label[:, None, None, None]).astype(np.uint8),
        "label": np.eye(10, dtype=np.float32)[label],
        "index": 24 * step + np.arange(24, dtype=np.int64),
      }
      step += 1
      self._change(step, batch)
      yield batch


def _start(folder: pathlib.Path, devices: int = 1):
  """Sets up jax in this process; returns a function that trains."""
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  from vit_jax import train
  from vit_jax.config import cli

  file = runs.write_config(folder, STEPS)
  text = file.read_text().replace(
    "  return c\n", "  c.evals = {}\n  return c\n"
  )
  file.write_text(text)

  def run(name: str, change: Change | None = None, options=(), **more: Any):
    options = [f"--config={file}", "--fake_data", *options]
    options += ["--config.objective.loss=sigmoid", "--config.objective.mixup=0"]
    config = cli.parse("", {}, options).config
    data = Noise(change) if change else Noise()
    train.train_and_evaluate(config, str(folder / name), data, **more)
    return folder / name

  return run


def _nothing_else_saved(workdir: pathlib.Path, bad: int) -> int:
  """Checks every checkpoint of a run; returns how many there are."""
  import jax
  import numpy as np

  from vit_jax.checkpointing import checkpointer

  folders = sorted((workdir / "checkpoints").glob("[0-9]*"))
  for folder in folders:
    assert folder.name.isdigit() and int(folder.name) < bad, folder
    params, _ = checkpointer.load_params(str(folder))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params)), folder
  return len(folders)


def nonfinite(folder: pathlib.Path, seed: int) -> str:
  """Stops at one of several steps; skips several; names their records."""
  import numpy as np

  run = _start(folder)
  from vit_jax.batch import DataError
  from vit_jax.callbacks import nonfinite as nonfinite_lib

  rng, saved = random.Random(seed), 0
  stops = [rng.randrange(2, EVERY + 1), rng.randrange(EVERY + 1, STEPS)]

  def spoil(*steps: int) -> Change:
    def change(step: int, batch: dict) -> None:
      if step in steps:
        batch["label"][step % 24] = np.nan

    return change

  for bad in stops:
    workdir = folder / f"stop{bad}"
    try:
      run(workdir.name, spoil(bad))
    except FloatingPointError as e:
      text = str(e)
    else:
      raise AssertionError(f"step {bad} did not stop the run")
    newest = (bad - 1) // EVERY * EVERY
    assert f"at step {bad}: its update was not applied" in text, text
    expected = f"of step {newest}," if newest else "There is no checkpoint yet"
    assert expected in text, text
    saved += _nothing_else_saved(workdir, bad)
    (entry,) = nonfinite_lib.read(str(workdir))
    first = 24 * (bad - 1)
    assert entry["records"] == [list(range(first, first + 24))], entry

  skipped = sorted(rng.sample(range(2, STEPS), 5))
  options = ["--config.on_nonfinite=skip"]
  whole = run("whole", spoil(*skipped), options)

  def ends(step: int, batch: dict) -> None:
    if step > skipped[2]:
      raise DataError("no more")
    spoil(*skipped)(step, batch)

  with contextlib.suppress(DataError):
    run("halted", ends, options)
  halted = run("halted", spoil(*skipped), options)
  runs.assert_same(halted, whole)
  entries = nonfinite_lib.read(str(whole))
  assert [entry["step"] for entry in entries] == skipped, entries
  assert runs.rows(whole)[-1]["train/skipped"] == 5
  saved += _nothing_else_saved(whole, STEPS + 1)
  return (
    f"stopped at steps {stops[0]} and {stops[1]}, the records of each named;"
    f" {len(skipped)} of {STEPS} steps skipped, by a stopped and resumed"
    f" run as by one that was not; {saved} checkpoints, all finite"
  )


def two_processes(folder: pathlib.Path, seed: int) -> str:
  """Spoils the part of a batch that one process reads."""
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
  _nothing_else_saved(folder / "stop", bad)
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


def diverging(folder: pathlib.Path, seed: int) -> str:
  """Changes a run at a random step in two ways; `diff` names the step."""
  run = _start(folder)
  from vit_jax.batch import DataError
  from vit_jax.tools.reporting import run_diff

  rng = random.Random(seed)
  every = ["--config.log_steps=1"]
  plain = run("plain", options=every)
  assert run_diff.compare(str(plain), str(run("again", options=every))).is_equal
  at = rng.randrange(2, STEPS)

  def brighten(step: int, batch: dict) -> None:
    if step == at:
      batch["image"][5] ^= 64

  run("pixels", brighten, every)
  _differs_at(run_diff.compare(str(plain), str(folder / "pixels")), at)
  # A learning rate that changes on resume.
  start = EVERY * rng.randrange(1, STEPS // EVERY)

  def ends(step: int, batch: dict) -> None:
    if step > start:
      raise DataError("no more")

  with contextlib.suppress(DataError):
    run("rate", ends, every)
  options = [*every, "--config.optim.lr=0.0011"]
  run("rate", options=options, allow_change=("optim.lr",))
  comparison = run_diff.compare(str(plain), str(folder / "rate"))
  _differs_at(comparison, start + 1)
  assert "  config.optim.lr: 0.001 and 0.0011" in comparison.lines
  return (
    f"other pixels at step {at}, another learning rate from step {start + 1}"
    " on: each step named"
  )


def _differs_at(comparison: Any, step: int) -> None:
  text = "\n".join(comparison.lines)
  assert not comparison.is_equal and f"differ at step {step}," in text, text
  assert f"  step {step}: train/" in text, text


TRIALS = (
  Trial(
    "numbers.nonfinite",
    "A step whose loss or gradient is not finite changes nothing, is never"
    " saved, and is reported with its records; stop and skip do what they say",
    nonfinite,
    small="tests/callbacks/test_nonfinite.py",
    seconds=60,
  ),
  Trial(
    "numbers.two_processes",
    "The same with two processes, of which one reads what spoils the step",
    two_processes,
    small="tests/callbacks/test_nonfinite.py",
    seconds=100,
  ),
  Trial(
    "numbers.diverging",
    "`vit-jax diff` names the first row of metrics in which two runs differ",
    diverging,
    small="tests/reporting/test_diff.py",
    seconds=60,
  ),
)

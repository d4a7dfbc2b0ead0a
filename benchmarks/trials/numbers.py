"""Non-finite steps, bit flips, and runs that diverge from each other."""

import contextlib
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

from trials import runs
from trials.trial import Trial

STEPS, EVERY = 40, 7  # of a run, and between its checkpoints
FLIPS = 200
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

  def run(name: str, change: Change | None = None, words=(), **more: Any):
    words = [f"--config={file}", "--fake_data", *words]
    words += ["--config.objective.loss=sigmoid", "--config.objective.mixup=0"]
    config = cli.parse("", {}, words).config
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
  """Stops at one of several steps; skips several; says which they were."""
  import numpy as np

  run = _start(folder)
  from vit_jax.callbacks import fingerprints, repeat
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
    told = f"of step {newest}," if newest else "There is no checkpoint yet"
    assert told in text, text
    saved += _nothing_else_saved(workdir, bad)
    (entry,) = nonfinite_lib.read(str(workdir))
    first = 24 * (bad - 1)
    assert entry["records"] == [list(range(first, first + 24))], entry
    found = repeat.step(str(workdir), bad, Noise(spoil(bad)))
    assert list(found["records"]) == [first + bad % 24], found
    assert found["params"], found

  skipped = sorted(rng.sample(range(2, STEPS), 5))
  words = ["--config.on_nonfinite=skip", "--config.max_skipped=5"]
  whole = run("whole", spoil(*skipped), words)
  one_more = skipped[-1] + 1
  try:
    run("halted", spoil(*skipped, one_more), words)
  except FloatingPointError as e:
    assert "That makes 6 steps skipped" in str(e), e
  else:
    raise AssertionError("the limit of skipped steps did not stop the run")
  halted = run("halted", spoil(*skipped), words)
  runs.assert_same(halted, whole)
  found = fingerprints.read(whole)
  assert found["step"][found["is_applied"] == 0].tolist() == skipped
  assert runs.rows(whole)[-1]["train/skipped"] == 5
  saved += _nothing_else_saved(whole, STEPS + 1)
  return (
    f"stopped at steps {stops[0]} and {stops[1]}, each repeated and its record"
    f" named; {len(skipped)} of {STEPS} steps skipped, by a stopped and resumed"
    f" run as by one that was not; {saved} checkpoints, all finite"
  )


def two_processes(folder: pathlib.Path, seed: int) -> str:
  """Spoils the part of a batch that one process reads."""
  from vit_jax.callbacks import fingerprints
  from vit_jax.callbacks import nonfinite as nonfinite_lib
  from vit_jax.reporting import first_divergence as lib

  rng = random.Random(seed)
  config = runs.write_config(folder, STEPS)
  words = ["--config.objective.loss=sigmoid", "--config.checks.replay=10"]
  told = []

  def run(name: str, act: str, *more: str) -> tuple[list[int], int]:
    who = rng.randrange(2)
    acts = {who: ["batches", act], 1 - who: ["batches", "nothing"]}
    started = runs.start(config, folder / name, [*words, *more], 2, acts=acts)
    return runs.finish(started, 300), who

  codes, _ = run("plain", "nothing")
  assert codes == [0, 0], runs.said(folder / "plain")
  bad = rng.randrange(EVERY + 1, STEPS)
  codes, who = run("stop", f"nan:{bad}")
  for i in range(2):
    said = runs.said(folder / "stop", i)
    assert codes == [1, 1], f"{codes}\n{said}"
    assert f"at step {bad}: its update was not applied" in said, said
  _nothing_else_saved(folder / "stop", bad)
  (entry,) = nonfinite_lib.read(str(folder / "stop"))
  assert len({n for rows in entry["records"] for n in rows}) == 24, entry
  told.append(f"stopped both at step {bad} by a label of process {who}")

  skipped = sorted(rng.sample(range(2, STEPS), 3))
  codes, who = run(
    "skip", f"nan:{','.join(map(str, skipped))}", "--config.on_nonfinite=skip"
  )
  assert codes == [0, 0], runs.said(folder / "skip")
  found = fingerprints.read(folder / "skip")
  assert found["step"][found["is_applied"] == 0].tolist() == skipped
  told.append(f"skipped steps {', '.join(map(str, skipped))} of process {who}")

  at = rng.randrange(2, STEPS)
  codes, who = run("pixels", f"pixels:{at}")
  assert codes == [0, 0], runs.said(folder / "pixels")
  compared = lib.compare(str(folder / "plain"), str(folder / "pixels"))
  _parts_at(compared, at, "the same records with other pixels")
  told.append(f"diff names step {at}, a bit of an image of process {who}")
  return f"{'; '.join(told)}; every tenth step computed twice, alike"


def flipped(folder: pathlib.Path, seed: int) -> str:
  """Flips a bit of a state on one of eight devices, again and again."""
  _start(folder, devices=8)
  import jax
  import numpy as np

  from vit_jax import sharding, step
  from vit_jax.callbacks import replay
  from vit_jax.config import cli

  words = [f"--config={folder / 'small.py'}", "--config.mesh.data=2"]
  words += ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
  config = cli.parse("", {}, words).config
  mesh = sharding.make_mesh(config.mesh)
  facts = step.Facts(10, (16, 16), STEPS)
  assembly = step.assemble(config, facts, mesh)
  state = assembly.fresh_state()
  digest = replay.digests(step.shardings_of(assembly.state), mesh)
  before = np.asarray(digest(state))
  paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
  rng = random.Random(seed)
  devices = list(mesh.devices.flat)
  for _ in range(FLIPS):
    number, device = rng.randrange(len(leaves)), rng.choice(devices)
    parts = []
    for shard in leaves[number].addressable_shards:
      data = np.array(shard.data)
      if shard.device == device:
        words = data.view(np.uint32).reshape(-1)
        words[rng.randrange(words.size)] ^= np.uint32(1 << rng.randrange(32))
      parts.append(jax.device_put(data, shard.device))
    leaf = jax.make_array_from_single_device_arrays(
      leaves[number].shape, leaves[number].sharding, parts
    )
    other = jax.tree.unflatten(
      jax.tree.structure(state), [*leaves[:number], leaf, *leaves[number + 1 :]]
    )
    after = np.asarray(digest(other))
    path = sharding.path_of(paths[number])
    told = replay.differences(before, after, state, mesh)
    want = f"1 of {len(leaves)} arrays, the first is {path}, on {device}"
    assert told == want, f"{told}, expected {want}"
    if len({str(s.index) for s in leaf.addressable_shards}) < 4:
      # Both results have it: then the copies on other devices tell.
      told = replay.differences(after, after, state, mesh)
      assert told == want, f"{told}, expected {want}"
  return f"{FLIPS} of {FLIPS} flipped bits caught, each with array and device"


def parting(folder: pathlib.Path, seed: int) -> str:
  """Changes a run at a random step in four ways; `diff` names step and way."""
  run = _start(folder)
  from vit_jax.batch import DataError
  from vit_jax.reporting import first_divergence as lib

  rng = random.Random(seed)
  plain = run("plain")
  assert lib.compare(str(plain), str(run("again"))).is_equal

  def records(batch):
    batch["index"][3] += 1

  def order(batch):
    for key in batch:
      batch[key][[1, 2]] = batch[key][[2, 1]]

  def pixels(batch):
    batch["image"][5, 6, 7, 1] ^= 1

  ways = {
    records: "other records",
    order: "the same records in another order",
    pixels: "the same records with other pixels",
  }
  found = []
  for change, words in ways.items():
    at = rng.randrange(2, STEPS)
    name = change.__name__
    run(name, lambda step, batch: step == at and change(batch))  # noqa: B023
    _parts_at(lib.compare(str(plain), str(folder / name)), at, words)
    found.append(at)
  # A learning rate that changes on resume.
  start = EVERY * rng.randrange(1, STEPS // EVERY)

  def ends(step: int, batch: dict) -> None:
    if step > start:
      raise DataError("no more")

  with contextlib.suppress(DataError):
    run("rate", ends)
  words = ["--config.optim.lr=0.0011"]
  run("rate", words=words, allow_change=("optim.lr",))
  told = lib.compare(str(plain), str(folder / "rate"))
  _parts_at(told, start + 1, "another update")
  assert "  config.optim.lr: 0.001 and 0.0011" in told.lines, told.lines
  return (
    f"parted at steps {', '.join(map(str, [*found, start + 1]))}: each named,"
    " with other records, order, pixels, and update"
  )


def _parts_at(found: Any, step: int, words: str) -> None:
  text = "\n".join(found.lines)
  assert not found.is_equal and f"part at step {step}" in text, text
  assert f"  step {step}: " in text and words in text, text


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
    "numbers.flipped",
    "Of a step computed twice a single bit that differs is caught",
    flipped,
    small="tests/callbacks/test_replay.py",
    seconds=20,
  ),
  Trial(
    "numbers.parting",
    "`vit-jax diff` names the first step at which two runs differ, and how",
    parting,
    small="tests/commands/test_diff.py",
    seconds=60,
  ),
)

"""Damaged checkpoints, readers beside a run, what digests cost.

One process, a tiny model: what is tried is `checkpoint.Checkpointer`, as the
train loop uses it.
"""

import os
import pathlib
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from unittest import mock

import jax

from faults.saved import (
  METADATA,
  Saved,
  bits,
  captured_stderr,
  made_up,
  saved,
  tiny,
)
from faults.trial import Trial
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.checkpointing import layout, retention
from vit_jax.config import CheckpointConfig

SMALL = "tests/checkpointing/test_damage.py"


def flip(path: pathlib.Path, rng: random.Random) -> None:
  raw = bytearray(path.read_bytes())
  raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
  path.write_bytes(raw)


def truncate(path: pathlib.Path, rng: random.Random) -> None:
  os.truncate(path, rng.randrange(path.stat().st_size))


def garbage(path: pathlib.Path, rng: random.Random) -> None:
  path.write_bytes(rng.randbytes(path.stat().st_size))


def zeros(path: pathlib.Path, rng: random.Random) -> None:
  """As a file system may leave the end of a file after a power cut."""
  raw = path.read_bytes()
  begin = rng.randrange(len(raw))
  path.write_bytes(raw[:begin] + bytes(len(raw) - begin))


DAMAGES: dict[str, Callable[[pathlib.Path, random.Random], None]] = {
  "a flipped bit": flip,
  "truncated": truncate,
  "emptied": lambda path, rng: path.write_bytes(b""),
  "deleted": lambda path, rng: path.unlink(),
  "garbage of its length": garbage,
  "zeros to its end": zeros,
}


def outcome(run: Saved, folder: pathlib.Path, what: str) -> str:
  """Resumes, reads and verifies; returns what became of it.

  Returns:
    "same bits", if step 2 was restored, or "named", if it was passed over.

  Raises:
    AssertionError: Anything else.
  """
  with captured_stderr() as out:
    # First the reader, which must leave the folder as it is.
    params, metadata = checkpointer_lib.load_params(str(folder))
    read = metadata["step"]
    want = bits(
      checkpointer_lib.load_params(str(run.folder / "checkpoints" / f"{read}"))[
        0
      ]
    )
    assert bits(params) == want, f"{what}: load_params gave other bits"
    why = checkpointer_lib.verify(
      layout.epath.Path(folder / "checkpoints" / "2")
    )
    start, errors = retention.start(layout.epath.Path(folder / "checkpoints"))
    assert not errors, f"{what}: {errors}"
    checkpointer = checkpointer_lib.Checkpointer(
      str(folder), CheckpointConfig()
    )
    n, state, _ = checkpointer.restore_newest(start, run.state)
    checkpointer.close()
  text = out.getvalue()
  assert "Traceback" not in text, f"{what}: {text}"
  assert bits(state) == run.states[n], f"{what}: silently other bits"
  names = sorted(p.name for p in (folder / "checkpoints").iterdir())
  if n == 2:
    assert why is None, f"{what}: restored, but verify says {why}"
    return "same bits"
  assert why, f"{what}: passed over, but verify finds nothing"
  assert "damaged" in text and "/checkpoints/2" in text, f"{what}: not named"
  assert "2.damaged" in names, f"{what}: not there any more ({names})"
  return "named"


def damaged_files(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  run = saved(folder / "run")
  files = [
    p.relative_to(run.folder)
    for p in sorted((run.folder / "checkpoints" / "2").rglob("*"))
    if p.is_file()
  ]
  counts = {"same bits": 0, "named": 0}
  for number, file in enumerate(files):
    # Flipped bits are what a look at sizes does not show.
    for name, damage in [*DAMAGES.items(), ("a second flipped bit", flip)]:
      copy = folder / f"{number}"
      shutil.copytree(run.folder, copy)
      before = (copy / file).read_bytes()
      damage(copy / file, rng)
      is_same = (copy / file).exists() and (copy / file).read_bytes() == before
      if not is_same:
        counts[outcome(run, copy, f"{file}, {name}")] += 1
      shutil.rmtree(copy)
  return (
    f"{sum(counts.values())} damages to {len(files)} files:"
    f" {counts['named']} named and passed over, {counts['same bits']} without"
    " effect on any bit, 0 silent, 0 tracebacks"
  )


def damaged_folders(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  run = saved(folder / "run")
  number = 0

  def copied() -> pathlib.Path:
    nonlocal number
    number += 1
    copy = folder / f"{number}"
    shutil.copytree(run.folder, copy)
    return copy

  for _ in range(20):  # as rsync or scp leave it when they are stopped
    copy = copied()
    files = [p for p in (copy / "checkpoints/2").rglob("*") if p.is_file()]
    for file in rng.sample(files, rng.randrange(1, len(files))):
      file.unlink()
    outcome(run, copy, "copied half")
  for name in ("params", "train", "metadata", "params/d", "train/d"):
    copy = copied()
    shutil.rmtree(copy / "checkpoints/2" / name)
    assert outcome(run, copy, f"{name} removed") == "named"
  copy = copied()
  shutil.rmtree(copy / "checkpoints/2")
  (copy / "checkpoints/2").mkdir()
  assert outcome(run, copy, "an empty folder") == "named"
  copy = copied()
  for name in ("3.orbax-checkpoint-tmp", "4.deleted", "notes", "0x5", "٣"):
    (copy / "checkpoints" / name).mkdir()
  assert outcome(run, copy, "folders of other names") == "same bits"
  stops = 0
  for what in ("all damaged", "all gone", "checkpoints/ gone"):
    copy = copied()
    for n in (1, 2):
      if what == "all damaged":
        (copy / f"checkpoints/{n}/params/_METADATA").write_text("{")
      else:
        shutil.rmtree(copy / f"checkpoints/{n}")
    if what == "checkpoints/ gone":
      shutil.rmtree(copy / "checkpoints")
    with captured_stderr():
      start, errors = retention.start(layout.epath.Path(copy / "checkpoints"))
    assert start == 0 and "start over" in errors[0], f"{what}: {errors}"
    stops += 1
  return f"{number - stops} folders passed over or restored, {stops} stops"


def readers(folder: pathlib.Path, seed: int) -> str:
  """Reads all the time, while a run saves and removes."""
  shapes = tiny()
  states = {n: made_up(shapes, n) for n in range(1, 41)}
  want = {n: bits(s.eval_params) for n, s in states.items()}
  checkpointer = checkpointer_lib.Checkpointer(
    str(folder), CheckpointConfig(keep_last=1)
  )
  checkpointer.save_now(1, states[1], {"step": 1})
  read, errors, over = [], [], threading.Event()

  def read_all() -> None:
    while not over.is_set():
      try:
        params, metadata = checkpointer_lib.load_params(str(folder))
        n = metadata["step"]
        assert bits(params) == want[n], f"step {n}: other bits"
        read.append(n)
      except Exception as e:
        errors.append(f"{type(e).__name__}: {e}")

  threads = [threading.Thread(target=read_all) for _ in range(2)]
  with captured_stderr() as out:
    for thread in threads:
      thread.start()
    for n in range(2, 41):
      checkpointer.save_now(n, states[n], {"step": n})
    over.set()
    for thread in threads:
      thread.join()
    checkpointer.close()
  assert not errors, f"{len(errors)} errors: {errors[0]}"
  assert "damaged" not in out.getvalue(), out.getvalue()
  assert read == sorted(read) or len(set(read)) > 10
  return (
    f"{len(read)} reads of {len(set(read))} of 40 steps, each removed as the"
    " next was there: all whole"
  )


def cost(folder: pathlib.Path, seed: int) -> str:
  """Saves of a state of S/16's size, with and without digests, in turns."""
  from vit_jax import digests

  shapes = tiny(width=384, depth=12)
  state = made_up(shapes, seed)
  size = sum(x.nbytes for x in jax.tree.leaves(state))

  class Nothing:
    def __init__(self, tree):
      self.get = dict

  # Seconds of all cores: other work of the machine does not count in them.
  seconds = {of: [] for of in (digests.of_state, Nothing)}
  for n in range(10):
    for of in sorted(seconds, key=lambda of: (of is Nothing) ^ n % 2):
      workdir = folder / f"{n}.{of.__name__}"
      checkpointer = checkpointer_lib.Checkpointer(
        str(workdir), CheckpointConfig()
      )
      with mock.patch.object(digests, "of_state", of):
        began = time.process_time()
        checkpointer.save(1, state, METADATA)
        checkpointer.close()
        seconds[of].append(time.process_time() - began)
      shutil.rmtree(workdir)
  with_them, without = (statistics.median(s[2:]) for s in seconds.values())
  share = 1 - without / with_them
  assert share < 0.2, f"{share:.1%} of a save's time"
  return (
    f"{share:.1%} of the {with_them:.2f} s of processor time of a save of"
    f" {size / 1e6:,.0f} MB (medians of 8)"
  )


TRIALS = (
  Trial(
    "checkpoints.damaged_files",
    "A checkpoint of which any file is damaged is named and passed over for the"
    " newest good one, or gives the same bits.",
    damaged_files,
    small=SMALL,
    seconds=90,
  ),
  Trial(
    "checkpoints.damaged_folders",
    "Empty, half-copied and missing checkpoints are reported; where none is"
    " left the run stops and says how to start over.",
    damaged_folders,
    small=SMALL,
    seconds=30,
  ),
  Trial(
    "checkpoints.readers",
    "evaluate, report and load beside a run always read a whole checkpoint.",
    readers,
    small=SMALL,
    seconds=30,
  ),
  Trial(
    "checkpoints.cost",
    "The digests take less than a fifth of a save's processor time, where the"
    " processor has to compute them.",
    cost,
    seconds=40,
  ),
)

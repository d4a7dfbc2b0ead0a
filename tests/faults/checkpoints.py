"""Damaged checkpoints, and readers beside a run.

One process, a tiny model: what is tried is `checkpoint.Checkpointer`, as the
train loop uses it.
"""

import os
import pathlib
import random
import shutil
import threading
from collections.abc import Callable

from faults.saved import (
  Saved,
  bits,
  captured_stderr,
  made_up,
  saved,
  tiny,
)
from faults.trial import trial
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.checkpointing import layout, retention
from vit_jax.config import CheckpointConfig


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


@trial(
  "A checkpoint of which any file is damaged is named and passed over for the"
  " newest good one, or gives the same bits.",
  seconds=90,
)
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


@trial(
  "evaluate, report and load beside a run always read a whole checkpoint.",
  seconds=30,
)
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

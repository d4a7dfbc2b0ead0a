"""Saves that fail: disks without room, without permission, without luck."""

import contextlib
import errno
import os
import pathlib
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from unittest import mock

import several

from faults.saved import (
  assert_no_own_stack,
  captured_stderr,
  made_up,
  tiny,
)
from faults.trial import trial
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.checkpointing import layout
from vit_jax.config import CheckpointConfig


@contextlib.contextmanager
def failing(call: str, number: int, when: Callable[[str], bool]):
  """Calls of `os` then fail for some paths, as on a full disk."""
  real = getattr(os, call)

  def fake(path, *args, **options):
    if when(str(path)):
      raise OSError(number, os.strerror(number), str(path))
    return real(path, *args, **options)

  with mock.patch.object(os, call, fake):
    yield


@contextlib.contextmanager
def largest_file(size: int):
  """No file may then grow larger: every layer gets EFBIG, TensorStore too."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def is_unfinished(path: str) -> bool:
  return "orbax-checkpoint-tmp" in path


FAILURES = {
  "no file grows beyond 10 kB": lambda: largest_file(10_000),
  "no file can be written": lambda: largest_file(0),
  "ENOSPC at the rename": lambda: failing(
    "rename", errno.ENOSPC, is_unfinished
  ),
  "EACCES at the rename": lambda: failing(
    "rename", errno.EACCES, is_unfinished
  ),
  "EIO at a folder": lambda: failing("mkdir", errno.EIO, is_unfinished),
}


@trial(
  "The last checkpoint that was verified good is never removed.",
  seconds=30,
)
def retention(folder: pathlib.Path, seed: int) -> str:
  """Ten cycles, in which saves fail and folders are damaged at random."""
  rng = random.Random(seed)
  shapes = tiny()
  checkpointer = checkpointer_lib.Checkpointer(
    str(folder), CheckpointConfig(keep_last=1)
  )
  root = folder / "checkpoints"
  good, cycles, failures, watched = 0, 0, 0, []
  over = threading.Event()

  def watch() -> None:  # a whole one at every instant
    while not over.wait(0.002):
      watched.append(bool(layout.step_folders(layout.epath.Path(root))))

  watcher = threading.Thread(target=watch)
  n = 0
  with captured_stderr() as out:
    while cycles < 10:
      n += 1
      state = made_up(shapes, n)
      fails = good and rng.random() < 0.5
      name = rng.choice(list(FAILURES))
      with FAILURES[name]() if fails else contextlib.nullcontext():
        checkpointer.save(n, state, {"step": n})
        while not checkpointer.is_idle():
          time.sleep(0.01)
      checkpointer.retry_due(n)
      steps = checkpointer.steps()
      if fails:
        failures += 1
        assert good in steps, f"after {name}: {good} is gone, {steps}"
      else:
        assert steps == [n], f"{steps}, expected [{n}]\n{out.getvalue()}"
        assert checkpointer_lib.verify(layout.epath.Path(root / str(n))) is None
        cycles += bool(good)
        good = n
      if not watcher.is_alive():
        watcher.start()
    over.set()
    watcher.join()
    checkpointer.close()
  assert_no_own_stack(out.getvalue())
  assert all(watched), "for a moment there was no checkpoint"
  return (
    f"{cycles} cycles that keep one, {failures} failed saves between:"
    f" a whole checkpoint at each of {len(watched):,} looks"
  )


# Each process writes half of every array. Process 1 fails in the save of step
# 8, process 0 in that of step 16; both must go on alike.
OF_TWO = """
import sys, time
import jax
jax.distributed.initialize({address!r}, 2, int(sys.argv[1]))
import contextlib
from faults import saved, saves
from vit_jax.checkpointing import checkpointer as checkpoint
from vit_jax.config import CheckpointConfig
shapes = saved.tiny(fsdp=2)
where = jax.tree.map(lambda x: x.sharding, shapes)
def state(n):
  full = lambda x: jax.numpy.full(x.shape, n, x.dtype)
  made = lambda: jax.tree.map(full, shapes)
  return jax.jit(made, out_shardings=where)()
saver = checkpoint.Checkpointer({folder!r}, CheckpointConfig(keep_last=9))
tried = []
me = jax.process_index()
for n in range(1, 25):
  if n % 8 == 0 or saver.retry_due(n):
    fails = n == 8 and me == 1 or n == 16 and me == 0
    most = 5_000 if me == 0 else 200  # process 0 has to write its probe
    with saves.largest_file(most) if fails else contextlib.nullcontext():
      saver.save(n, state(n), {{"step": n}})
      tried.append(n)
      while not saver.is_idle():
        time.sleep(0.01)
saver.save_now(24, state(24), {{"step": 24}})
step, back, _ = saver.restore_newest(24, shapes)
assert step == 24
same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
assert all(jax.tree.leaves(jax.device_get(same(back, state(24)))))
saver.close()
print("SAVES", tried, saver.steps(), flush=True)
"""


@trial(
  "Where one process cannot write, all go on alike, and none waits for it.",
  seconds=40,
)
def two_processes(folder: pathlib.Path, seed: int) -> str:
  code = OF_TWO.format(address=several.address(), folder=str(folder / "run"))
  began = time.monotonic()
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  env |= {"JAX_PLATFORMS": "cpu"}
  commands = [[sys.executable, "-c", code, str(i)] for i in range(2)]
  results = several.run(commands, [env] * 2)
  for returned, out, err in results:
    assert returned == 0, out + err
    assert "SAVES [8, 10, 16, 18, 24] [10, 18, 24]" in out, out + err
  (*_, first), (*_, second) = results
  assert first.count("NOT SAVED") == 2 and "another process" in first, first
  assert "step 8 (ValueError" in second or "step 8 (OSError" in second, second
  return (
    "process 1 fails, then process 0: both say so and write again at the same"
    f" step; nobody waits for a time-out ({time.monotonic() - began:.0f} s)"
  )

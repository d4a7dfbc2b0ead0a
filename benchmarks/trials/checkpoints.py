"""Damaged checkpoints, saves that fail, readers beside a run.

One process, a tiny model: what is tried is `checkpoint.Checkpointer`, as the
train loop uses it.
"""

import contextlib
import errno
import io
import os
import pathlib
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from trials.trial import Trial
from vit_jax import checkpoint, sharding, step
from vit_jax.config import CheckpointConfig, ConfigError, defaults, freeze
from vit_jax.weights import keeping, saving, steps

SMALL = "tests/test_checkpoint_faults.py"
METADATA = {"config": {"seed": 0}, "class_names": ["a", "b"]}


class Saved(NamedTuple):
  """A folder with the checkpoints of steps 1 and 2, and their bits.

  state: Abstract.
  states: Step -> flat bytes of each array.
  """

  folder: pathlib.Path
  state: Any
  states: dict[int, list[bytes]]


def tiny(width: int = 32, depth: int = 2, fsdp: int = 1) -> Any:
  """Returns the abstract state of a small ViT with an average."""
  c = defaults()
  c.total_steps = 20
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = width, depth
  c.model.mlp_dim, c.model.num_heads = 2 * width, 4
  c.data.ops, c.data.batch_size = "decode|resize(16)", 16
  c.optim.ema_decay = 0.9
  c.mesh.fsdp = fsdp
  config = freeze(c)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:fsdp])
  return step.assemble(config, step.Facts(10, (16, 16), 20), mesh).state


def made_up(shapes: Any, seed: int) -> Any:
  """Returns a state of these shapes, no two of its numbers alike."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jax.device_put(
      np.asarray(100 * rng.normal(size=x.shape), x.dtype), x.sharding
    ),
    shapes,
  )


def bits(tree: Any) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def saved(folder: pathlib.Path) -> Saved:
  shapes = tiny()
  states = {n: made_up(shapes, n) for n in (1, 2)}
  checkpointer = checkpoint.Checkpointer(str(folder), CheckpointConfig())
  for n, state in states.items():
    checkpointer.save_now(n, state, {**METADATA, "step": n})
  checkpointer.close()
  return Saved(folder, shapes, {n: bits(s) for n, s in states.items()})


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
  """Catches what is printed to stderr."""
  out = io.StringIO()
  with contextlib.redirect_stderr(out):
    yield out


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
  with said() as out:
    # First the reader, which must leave the folder as it is.
    params, metadata = checkpoint.load_params(str(folder))
    read = metadata["step"]
    want = bits(
      checkpoint.load_params(str(run.folder / "checkpoints" / f"{read}"))[0]
    )
    assert bits(params) == want, f"{what}: load_params gave other bits"
    why = checkpoint.verify(steps.epath.Path(folder / "checkpoints" / "2"))
    start, faults = keeping.start(steps.epath.Path(folder / "checkpoints"))
    assert not faults, f"{what}: {faults}"
    checkpointer = checkpoint.Checkpointer(str(folder), CheckpointConfig())
    n, state = checkpointer.restore_newest(start, run.state)
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
    with said():
      start, faults = keeping.start(steps.epath.Path(copy / "checkpoints"))
    assert start == 0 and "start over" in faults[0], f"{what}: {faults}"
    stops += 1
  return f"{number - stops} folders passed over or restored, {stops} stops"


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


def failed_saves(folder: pathlib.Path, seed: int) -> str:
  shapes = tiny()
  told = []
  for number, (name, failure) in enumerate(FAILURES.items()):
    workdir = folder / f"{number}"
    checkpointer = checkpoint.Checkpointer(str(workdir), CheckpointConfig())
    states = {n: made_up(shapes, n) for n in range(1, 13)}
    saves, seen = [], {}
    with said() as out:
      for n, state in states.items():  # the train loop, a save every 4 steps
        retries = checkpointer.retry_due(n)
        if n % 4 == 0 or retries:
          during = failure() if 4 < n < 10 else contextlib.nullcontext()
          with during:
            checkpointer.save(n, state, {**METADATA, "step": n})
            saves.append(n)
            while not checkpointer.is_idle():
              time.sleep(0.01)
        seen[n] = out.getvalue().count("NOT SAVED")
      checkpointer.save_now(12, states[12], {**METADATA, "step": 12})
      checkpointer.close()
    text = out.getvalue()
    assert "Traceback" not in text, f"{name}: {text}"
    assert saves[:3] == [4, 8, 10], f"{name}: saved at {saves}\n{text}"
    assert seen[8] == 0 and seen[9] == 1, f"{name}: told late\n{text}"
    there = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    assert there == ["10", "12"], f"{name}: {there} are kept"
    last = checkpoint.Checkpointer(str(workdir), CheckpointConfig())
    n, state = last.restore_newest(12, shapes)
    last.close()
    assert n == 12 and bits(state) == bits(states[12]), name
    told.append(name)
    # To the end of the run: an error of the run, and what was there stays.
    workdir = folder / f"{number}.end"
    last = checkpoint.Checkpointer(str(workdir), CheckpointConfig())
    with said(), mock.patch.object(saving, "WAITS", (0.01, 0.01)):
      last.save_now(1, states[1], METADATA)
      try:
        with failure():
          last.save_now(2, states[2], METADATA)
        raise AssertionError(f"{name}: no error at the end of the run")
      except checkpoint.SaveError as e:
        assert "step 2" in str(e) and "that of step 1" in str(e), e
      last.close()
    assert last.steps() == [1]
  return (
    f"{len(told)} kinds ({', '.join(told)}): told at the next step, written"
    " again 2 steps later, the two newest kept; at the end of a run an error"
  )


def full_disk(folder: pathlib.Path, seed: int) -> str:
  """A disk of 2 MB, where it may be mounted."""
  disk = folder / "disk"
  disk.mkdir()
  if os.system(f"mount -t tmpfs -o size=2m tmpfs {disk} 2>/dev/null"):
    return "not tried: no disk may be mounted here"
  try:
    shapes = tiny()
    states = {n: made_up(shapes, n) for n in (1, 2)}
    checkpointer = checkpoint.Checkpointer(str(disk), CheckpointConfig())
    with said() as out, mock.patch.object(saving, "WAITS", (0.01,)):
      checkpointer.save_now(1, states[1], METADATA)
      free = shutil.disk_usage(disk).free
      (disk / "other").write_bytes(bytes(free - 40_000))
      try:
        checkpointer.save_now(2, states[2], METADATA)
        raise AssertionError("saved on a full disk")
      except checkpoint.SaveError as e:
        text = str(e)
      (disk / "other").unlink()
      checkpointer.save_now(2, states[2], METADATA)
      (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 9_000))
      try:
        checkpointer.restore_newest(0, shapes)
        raise AssertionError("a full disk was not told at the start")
      except ConfigError as e:
        assert "free" in str(e)
      checkpointer.close()
    assert "No space left" in text or "ENOSPC" in text, text
    assert "Traceback" not in out.getvalue()
    assert checkpointer.steps() == [1, 2]
    restored = checkpointer.restore(2, shapes)
    assert bits(restored) == bits(states[2])
  finally:
    os.system(f"umount {disk}")
  return (
    "a full tmpfs: told, step 1 stayed whole, step 2 saved once it had room"
  )


def retention(folder: pathlib.Path, seed: int) -> str:
  """Ten cycles, in which saves fail and folders are damaged at random."""
  rng = random.Random(seed)
  shapes = tiny()
  checkpointer = checkpoint.Checkpointer(
    str(folder), CheckpointConfig(keep_last=1)
  )
  root = folder / "checkpoints"
  good, cycles, failures, watched = 0, 0, 0, []
  over = threading.Event()

  def watch() -> None:  # a whole one at every instant
    while not over.wait(0.002):
      watched.append(bool(steps.of(steps.epath.Path(root))))

  watcher = threading.Thread(target=watch)
  n = 0
  with said() as out:
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
      found = checkpointer.steps()
      if fails:
        failures += 1
        assert good in found, f"after {name}: {good} is gone, {found}"
      else:
        assert found == [n], f"{found}, expected [{n}]\n{out.getvalue()}"
        assert checkpoint.verify(steps.epath.Path(root / str(n))) is None
        cycles += bool(good)
        good = n
      if not watcher.is_alive():
        watcher.start()
    over.set()
    watcher.join()
    checkpointer.close()
  assert all(watched), "for a moment there was no checkpoint"
  return (
    f"{cycles} cycles with one kept, {failures} failed saves between:"
    f" a whole checkpoint at each of {len(watched):,} looks"
  )


def readers(folder: pathlib.Path, seed: int) -> str:
  """Reads all the time, while a run saves and removes."""
  shapes = tiny()
  states = {n: made_up(shapes, n) for n in range(1, 41)}
  want = {n: bits(s.eval_params) for n, s in states.items()}
  checkpointer = checkpoint.Checkpointer(
    str(folder), CheckpointConfig(keep_last=1)
  )
  checkpointer.save_now(1, states[1], {"step": 1})
  read, errors, over = [], [], threading.Event()

  def read_all() -> None:
    while not over.is_set():
      try:
        params, metadata = checkpoint.load_params(str(folder))
        n = metadata["step"]
        assert bits(params) == want[n], f"step {n}: other bits"
        read.append(n)
      except Exception as e:
        errors.append(f"{type(e).__name__}: {e}")

  threads = [threading.Thread(target=read_all) for _ in range(2)]
  with said() as out:
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
  from vit_jax.weights import digests

  shapes = tiny(width=384, depth=12)
  state = made_up(shapes, seed)
  size = sum(x.nbytes for x in jax.tree.leaves(state))

  class Nothing:
    def __init__(self, tree):
      self.ready = lambda: None
      self.get = dict

  # Seconds of all cores: other work of the machine does not count in them.
  seconds = {of: [] for of in (digests.of_state, Nothing)}
  for n in range(10):
    for of in sorted(seconds, key=lambda of: (of is Nothing) ^ n % 2):
      workdir = folder / f"{n}.{of.__name__}"
      checkpointer = checkpoint.Checkpointer(str(workdir), CheckpointConfig())
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


# Each process writes half of every array. Process 1 fails in the save of step
# 8, process 0 in that of step 16; both must go on alike.
OF_TWO = """
import resource, sys, time
import jax
sys.path[:0] = {paths}
jax.distributed.initialize({address!r}, 2, int(sys.argv[1]))
import contextlib
from trials import checkpoints as c
from vit_jax import checkpoint, sharding
from vit_jax.config import CheckpointConfig, MeshConfig
shapes = c.tiny(fsdp=2)
where = jax.tree.map(lambda x: x.sharding, shapes)
def state(n):
  full = lambda x: jax.numpy.full(x.shape, n, x.dtype)
  made = lambda: jax.tree.map(full, shapes)
  return jax.jit(made, out_shardings=where)()
saver = checkpoint.Checkpointer({folder!r}, CheckpointConfig(keep_last=9))
saves = []
me = jax.process_index()
for n in range(1, 25):
  if n % 8 == 0 or saver.retry_due(n):
    fails = n == 8 and me == 1 or n == 16 and me == 0
    with c.largest_file(5_000) if fails else contextlib.nullcontext():
      saver.save(n, state(n), {{"step": n}})
      saves.append(n)
      while not saver.is_idle():
        time.sleep(0.01)
saver.save_now(24, state(24), {{"step": 24}})
step, back = saver.restore_newest(24, shapes)
assert step == 24
same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
assert all(jax.tree.leaves(jax.device_get(same(back, state(24)))))
saver.close()
print("SAVES", saves, saver.steps(), flush=True)
"""


def two_processes(folder: pathlib.Path, seed: int) -> str:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  here = pathlib.Path(__file__).parents
  code = OF_TWO.format(
    paths=[str(here[2]), str(here[1])],
    address=address,
    folder=str(folder / "run"),
  )
  began = time.monotonic()
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  running = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(i)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env | {"JAX_PLATFORMS": "cpu"},
    )
    for i in range(2)
  ]
  try:
    texts = [p.communicate(timeout=300) for p in running]
  finally:
    for p in running:
      p.kill()
  for p, (out, err) in zip(running, texts, strict=True):
    assert p.returncode == 0, out + err
    assert "Traceback" not in err, err
    assert "SAVES [8, 10, 16, 18, 24] [10, 18, 24]" in out, out + err
  (_, first), (_, second) = texts
  assert first.count("NOT SAVED") == 2 and "process 1: " in first, first
  assert "step 8 (ValueError" in second or "step 8 (OSError" in second, second
  return (
    "process 1 fails, then process 0: both say so and write again at the same"
    f" step; nobody waits for a time-out ({time.monotonic() - began:.0f} s)"
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
    "Empty, half-copied and missing checkpoints are told; where none is left"
    " the run stops and says how to start over.",
    damaged_folders,
    small=SMALL,
    seconds=30,
  ),
  Trial(
    "checkpoints.failed_saves",
    "A save that fails is told at the next step and tried again; at the end of"
    " a run it is an error.",
    failed_saves,
    small=SMALL,
    seconds=40,
  ),
  Trial(
    "checkpoints.two_processes",
    "Where one process cannot write, all go on alike, and none waits for it.",
    two_processes,
    seconds=40,
  ),
  Trial(
    "checkpoints.full_disk",
    "A full disk costs no checkpoint that was there.",
    full_disk,
    small=SMALL,
    seconds=15,
  ),
  Trial(
    "checkpoints.retention",
    "The last checkpoint that was verified good is never removed.",
    retention,
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

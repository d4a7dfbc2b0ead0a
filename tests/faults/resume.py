"""Runs at once in one folder, full disks, odd bytes."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from faults import runs
from faults.saved import assert_no_own_stack
from faults.trial import trial

MANY = 8  # that start at the same moment
DAMAGES = 300
# Takes the folder, says so, and holds it until its input ends.
HOLD = (
  "import sys; from vit_jax.config import ConfigError\n"
  "from vit_jax.callbacks.run_lock import LostError, RunLock\n"
  "print('ready', flush=True); sys.stdin.readline()\n"
  "try:\n"
  "  with RunLock(sys.argv[1]) as lock:\n"
  "    lock.check(); print('owned', flush=True); sys.stdin.read()\n"
  "except (ConfigError, LostError) as e:\n"
  "  print(str(e).replace(chr(10), ' '), flush=True)\n"
)


@trial(
  "Of runs that start in a folder at the same moment, one goes on; a killed one"
  " is not in the way.",
  seconds=20,
)
def race(folder: pathlib.Path, seed: int) -> str:
  """Starts many at the same moment, twice; the second after a dead one."""
  del seed  # nothing is random
  for _ in range(2):
    started = [
      subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=runs.environment(folder),
        text=True,
        start_new_session=True,
      )
      for _ in range(MANY)
    ]
    try:
      assert all(p.stdout.readline() == "ready\n" for p in started)
      for p in started:
        p.stdin.write("\n")
        p.stdin.flush()
      output = [p.stdout.readline() for p in started]
    finally:
      runs.kill(started)
    owned = output.count("owned\n")
    refused = sum("another run t" in x for x in output)  # trains, or took it
    assert (owned, refused) == (1, MANY - 1), output
  return f"of {MANY} that started at once, one went on, twice"


@trial(
  "A disk that is full for a while costs neither rows nor bits.",
  seconds=60,
)
def full_disk(folder: pathlib.Path, seed: int) -> str:
  """A real disk that is full for a while; the run ends in the same bits."""
  del seed
  config, want = runs.write_config(folder, steps=60), folder / "want"
  runs.whole(config, want)
  with _disk(folder / "disk", megabytes=24) as disk:
    if disk is None:
      return "not tried: no file system can be mounted here"
    workdir = disk / "run"
    started = runs.start(config, workdir)
    log = pathlib.Path(f"{workdir}.0.log")
    try:
      runs.wait_for(workdir, "step 20/", started)
      os.kill(started[0].pid, signal.SIGSTOP)
      free = shutil.disk_usage(disk).free
      with contextlib.suppress(OSError), (disk / "full").open("wb") as file:
        for _ in range(free // 4096 + 1):
          file.write(b"\1" * 4096)
          file.flush()
      os.kill(started[0].pid, signal.SIGCONT)
      time.sleep(20.0)
      (disk / "full").unlink()
      codes = runs.finish(started, 200)
    finally:
      runs.kill(started)
    output = log.read_text(errors="replace")
    if any(codes):  # it may end with an error, and resumes when there is room
      assert_no_own_stack(output)
      runs.whole(config, workdir)
    runs.assert_same(workdir, want)
  how = "ended with an error, and resumed" if any(codes) else "went on"
  return f"full for 20 s from step 20 on: it {how}; the same rows and bits"


@trial(
  "Damaged small files are reported in a line each, never by a traceback.",
  seconds=10,
)
def odd_bytes(folder: pathlib.Path, seed: int) -> str:
  """Damages of the small files, read by all that read them."""
  from etils import epath

  from vit_jax.callbacks import accounting, run_lock, run_record
  from vit_jax.checkpointing import resume_rules
  from vit_jax.config import json_file
  from vit_jax.tools.reporting import runs as runs_lib
  from vit_jax.writers import atomic_files

  rng, workdir = random.Random(seed), folder / "run"
  with run_lock.RunLock(str(workdir)):
    pass
  row = {"step": 1, "time": 1.0, "train/loss": 2.5}
  change = {"step": 1, "key": "a", "from": 1, "to": 2, "by": "x"}
  names = {"class_names": ["a", "b"], "total_steps": 9}
  whole = {
    "metrics.jsonl": (json.dumps(row) + "\n") * 9,
    "config.json": '{"total_steps": 9, "data": {"dataset": "digits"}}',
    "metadata.json": json.dumps(names),
    "changes.jsonl": json.dumps(change) + "\n",
  }
  for name in (run_record.FILE, run_record.HEARTBEAT):
    whole[name] = (workdir / name).read_text()
  num_errors = 0
  for _ in range(DAMAGES):
    name = rng.choice(list(whole))
    for other, text in whole.items():
      (workdir / other).write_text(text)
    (workdir / name).write_bytes(_damaged(whole[name].encode(), rng))
    for other in whole:
      path = epath.Path(workdir) / other
      try:
        if other.endswith("l"):
          num_errors += bool(atomic_files.read_rows(path).damaged)
        else:
          json_file.read(path)
      except ValueError:
        num_errors += 1
    resume_rules.read(str(workdir))
    with contextlib.suppress(ValueError):
      runs_lib.find_runs(workdir)
    try:
      run_lock.refuse_live(str(workdir), note=lambda _: None)
    except ValueError as e:  # a record that seems to be of another machine
      assert "another run trains" in str(e), e
    run_record.intervals(workdir)
    account = accounting.Accounting(
      *(1, 1, 1), num_examples=1, workdir=str(workdir)
    )
    account.on_start(0, None, {})
    assert all(s >= 0 for s in account.state_dict(0)["seconds"].values())
  return (
    f"{DAMAGES} damages: no reader raised; {num_errors} error messages; seed"
    f" {seed}"
  )


def _damaged(data: bytes, rng: random.Random) -> bytes:
  """Returns bytes with something cut, flipped, put in or taken out."""
  at = rng.randrange(len(data))
  size = rng.choice([1, 4, 64])
  noise = rng.choice([b"\0" * size, rng.randbytes(size), b"[" * size, b"NaN"])
  return rng.choice(
    [
      data[:at],
      data[:at] + noise + data[at + size :],
      data[:at] + noise + data[at:],
      data[:at] + data[at + size :],
      b"",
      noise,
      data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
    ]
  )


@contextlib.contextmanager
def _disk(
  folder: pathlib.Path, megabytes: int
) -> Iterator[pathlib.Path | None]:
  """A small disk of its own; None where none can be mounted."""
  folder.mkdir()
  size = f"size={megabytes}m"
  mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
  if subprocess.run(mount, capture_output=True).returncode:
    yield None
    return
  try:
    yield folder
  finally:
    subprocess.run(["umount", "-l", str(folder)], check=True)

"""Which checkpoints a run keeps, and from which one it resumes.

A step is renamed before it is removed (`60.deleted`), so that a reader sees all
of it or nothing. If a run resumes from a step before damaged ones, these are
renamed (`70.damaged`), because the run will write them again.
"""

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Collection

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.checkpointing import layout
from vit_jax.paths import is_remote
from vit_jax.writers import atomic_files

NEWEST = "checkpoints.json"  # in the run's folder: its last good checkpoint
GONE = "the checkpoint of step {:,} is gone"
DAMAGED, DELETED = ".damaged", ".deleted"


def max_of_processes(value: int) -> int:
  """Returns the largest value of all processes. Collective."""
  if jax.process_count() == 1:
    return int(value)
  return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def probe(folder: epath.Path) -> None:
  """Makes a folder; raises OSError if files cannot be written in it."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / ".probe"
  path.write_bytes(bytes(4096))
  # Another run that starts now may have removed it.
  path.unlink(missing_ok=True)


def free_bytes(folder: epath.Path) -> int | None:
  """Returns the free space of the folder's disk; None if unknown."""
  for path in () if is_remote(folder) else (folder, *folder.parents):
    if path.is_dir():
      return shutil.disk_usage(path).free
  return None


def note_newest(folder: epath.Path, step: int) -> None:
  """Writes in the run's folder that a step has a checkpoint.

  A run with this note but without checkpoints has lost them.
  """
  text = json.dumps({"step": step}) + "\n"
  atomic_files.replace_text(folder.parent / NEWEST, text)


def noted_newest(folder: epath.Path) -> int:
  """Returns the step of `note_newest`; 0 without such a note.

  Raises:
    OSError: It cannot be read.
  """
  try:
    step = layout.read_json(folder.parent, NEWEST).get("step")
  except layout.DamagedError:
    return 0
  return step if isinstance(step, int) else 0


def start(folder: epath.Path) -> tuple[int, list[str]]:
  """Returns the step from which a run resumes, and errors; process 0 decides.

  Args:
    folder: Its `checkpoints/`, which need not exist.

  Returns:
    The newest step that seems complete, 0 for a new run; an error if none is
    complete although there was a checkpoint.
  """
  step, error = 0, ""
  if jax.process_index() == 0:
    try:
      good, bad = layout.whole(folder)
      for bad_step, reason in bad.items():
        layout.log_damage(folder / str(bad_step), reason)
      step = max(good, default=0)
      if not step and bad:
        error = no_checkpoint(folder, layout.NONE_WHOLE)
      elif not step and (last := noted_newest(folder)):
        error = no_checkpoint(folder, GONE.format(last))
    except Exception as e:  # a bucket's are no OSErrors; other processes wait
      error = f"{folder}: cannot be read ({type(e).__name__}: {e})."
  step = max_of_processes(step)
  if max_of_processes(bool(error)) and not error:
    error = f"{folder}: see the error of process 0."
  return step, [error] if error else []


def no_checkpoint(folder: epath.Path, reason: str) -> str:
  """Returns why a run does not resume, and how to start over on purpose."""
  return (
    f"{folder}: {reason}. Copy a complete one back; or, to start over from the"
    f" first step, take another --workdir, or delete {folder.parent}."
  )


def set_aside_after(folder: epath.Path, step: int) -> None:
  """Renames the later steps, which are all damaged; only in process 0."""
  if jax.process_index() != 0:
    return
  later = {
    s: path for s, path in layout.step_folders(folder).items() if s > step
  }
  for path in later.values():
    layout.log(f"set aside   {path} is now {set_aside(path).name}")
  last = 0
  with contextlib.suppress(OSError):  # only a note is lost
    last = noted_newest(folder)
  if last > step and last not in later:
    layout.log(f"note        {GONE.format(last)}")


def set_aside(folder: epath.Path) -> epath.Path:
  """Renames a damaged step, so that it can be written again; returns the path.

  Its name is then `70.damaged`, or `70.damaged.2`.
  """
  target, number = folder.parent / (folder.name + DAMAGED), 1
  while target.exists():
    number += 1
    target = folder.parent / f"{folder.name}{DAMAGED}.{number}"
  folder.rename(target)
  return target


def expired(
  good: Collection[int],
  there: Collection[int],
  keep_last: int,
  keep_every_steps: int | None,
) -> list[int]:
  """Returns the steps to remove.

  These are the steps before the newest `keep_last` complete ones, except the
  first at or after each multiple of `keep_every_steps` (the save at the
  multiple may have failed).

  Args:
    good: Steps that are complete.
    there: All steps that have a folder.
    keep_last: Number of newest complete checkpoints to keep.
    keep_every_steps: Also keep one checkpoint per this many steps; None for no
      others.

  Example:
    >>> expired([1, 2, 4], [1, 2, 3, 4], 2, None)
    [1]
  """
  if len(good) < keep_last:
    return []
  first = sorted(good)[-keep_last]
  stay = set()
  if every := keep_every_steps:
    for steps in (good, there):  # what seems damaged now may be whole again
      firsts = {s // every: s for s in sorted(steps, reverse=True)}
      stay |= {s for number, s in firsts.items() if number}
  return [s for s in sorted(there) if s < first and s not in stay]


def remove(folder: epath.Path) -> None:
  """Removes a step; a reader sees all of it or nothing."""
  if is_remote(folder):  # renaming would copy it
    (folder / layout.COMMITTED).unlink(missing_ok=True)
  else:
    target = folder.parent / (folder.name + DELETED)
    target.rmtree(missing_ok=True)
    folder = folder.rename(target)
  # The next save may clean up at the same time.
  folder.rmtree(missing_ok=True)


def clean(folder: epath.Path) -> None:
  """Removes what failed saves and interrupted removals left in `checkpoints/`.

  No save may be running.
  """
  finished = layout.step_folders(folder)
  for path in folder.iterdir() if folder.exists() else ():
    step, _, rest = path.name.partition(".")
    if not layout.is_step(step):
      continue
    is_left = rest.startswith(("deleted", "orbax-checkpoint-tmp"))
    if is_left or (not rest and int(step) not in finished):
      _remove_patiently(path)


def _remove_patiently(path: epath.Path) -> None:
  """Removes a folder to which threads of a failed save may still write."""
  for is_last in (*(False,) * 20, True):
    try:
      return path.rmtree(missing_ok=True)
    except OSError as e:
      if is_last or e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
        raise
      time.sleep(0.1)

"""A fingerprint of every step: `fingerprints.bin`, by which runs compare.

The train step returns 32 bytes (see `step.make_train_step`). They stay on the
device until a step of which metrics are written, and are then fetched together
and appended by process 0, so that no step waits for the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.writers import atomic_files

FILE = "fingerprints.bin"
MAGIC = b"vit_jax fingerprints 1 little-endian 36 bytes of each step   \n"
# After the number of the step they are what the step returns, bit by bit.
RECORD = np.dtype(
  [
    ("step", "<u4"),
    ("records", "<u4"),
    ("order", "<u4"),
    ("pixels", "<u4"),
    ("undecodable", "<u4"),
    ("loss", "<f4"),
    ("grad_norm", "<f4"),
    ("param_norm", "<f4"),
    ("is_applied", "<u4"),
  ]
)
MOST_PENDING = 1024  # steps whose fingerprints wait on the device
NEWEST = 8  # that are left there then: they may not be computed yet


class Fingerprints:
  """Collects what the steps return, and appends it to the file of the run.

  Args:
    workdir: Folder of the run.
    resumed_at: Step at which the run resumes; what later steps of an
      interrupted run wrote is dropped, since they come again.
    note: Prints a line where they cannot be written.
    guard: See `atomic_files.open_records`.

  Attributes:
    before: Of `RECORD`, the newest steps before; known to process 0 only.

  Raises:
    WriteError: They cannot be read or written now; later on they wait in
      memory.
  """

  def __init__(
    self,
    workdir: str,
    resumed_at: int = 0,
    note: Callable[[str], None] = print,
    guard: Callable[[], None] = lambda: None,
  ):
    self._pending: list[tuple[int, jax.Array]] = []
    self._file: atomic_files.Records | None = None
    self._note = note
    self.before = np.zeros(0, RECORD)
    if jax.process_index() != 0:
      return
    path = epath.Path(workdir) / FILE
    kept = _records(atomic_files.contents(path))
    kept = kept[kept["step"] <= resumed_at]
    self.before = kept[-NEWEST:].copy()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = MAGIC + kept.tobytes()
    self._file = atomic_files.open_records(path, data, note, guard)

  def add(self, step: int, of_step: jax.Array) -> None:
    """Takes what a step returned, without waiting for it."""
    self._pending.append((step, of_step))

  @property
  def is_full(self) -> bool:
    """Whether so many wait that some should be fetched."""
    return len(self._pending) >= MOST_PENDING

  def fetch(self, leave: int = 0) -> np.ndarray:
    """Returns what was added since the last call, and appends it to the file.

    All processes get the same.

    Args:
      leave: How many of the newest to leave for the next call.

    Returns:
      Of `RECORD`, in the order of the steps.
    """
    number = max(0, len(self._pending) - leave)
    taken, self._pending = self._pending[:number], self._pending[number:]
    values = jax.device_get([of_step for _, of_step in taken])
    words = [[step, *of] for (step, _), of in zip(taken, values, strict=True)]
    records = np.array(words, "<u4").view(RECORD).reshape(number)
    if self._file is not None and number:
      self._file.append(records.tobytes())
    return records

  def due(self) -> None:
    """Sees that what was fetched is on its way to a bucket."""
    if self._file is not None:
      self._file.flush()

  def close(self) -> None:
    """Closes the file; what was not fetched is lost."""
    if self._file is not None and (left := self._file.close()):
      self._note(f"file        {left}")


def read(workdir: Any) -> np.ndarray:
  """Returns the fingerprints of a run, of `RECORD`, by step.

  Empty where there are none. What was cut off or is not in the order of steps,
  as a machine that lost its power may leave it, is left out.
  """
  path = epath.Path(workdir) / FILE
  return _records(path.read_bytes() if path.is_file() else b"")


def _records(data: bytes) -> np.ndarray:
  if not data.startswith(MAGIC):
    return np.zeros(0, RECORD)
  number = (len(data) - len(MAGIC)) // RECORD.itemsize
  records = np.frombuffer(data, RECORD, number, len(MAGIC))
  steps = records["step"].astype(np.int64)
  newest = np.maximum.accumulate(np.append([0], steps))[:-1]
  return records[steps > newest]

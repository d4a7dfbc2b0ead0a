"""Files of a run that grow, where a run's folder is in a bucket.

No object of a store can be appended to: a client sends it anew, and for
appending fetches it before. So a thread sends the whole file now and then,
while the run goes on.
"""

import threading
from collections.abc import Callable

from etils import epath

from vit_jax.writers import atomic_files

SECONDS = 30.0  # between two uploads of a file; stores limit how many


def records(
  path: epath.Path,
  data: bytes,
  note: Callable[[str], None] = print,
  guard: Callable[[], None] = lambda: None,
) -> atomic_files.Records:
  """Returns the records of a file, wherever it is.

  Args:
    path: The file, which is replaced.
    data: What it holds at first.
    note: Prints a line on what cannot be written.
    guard: Is called before an upload, from its thread. Where it raises an
      OSError the folder is no longer this run's, and nothing is written.

  Raises:
    WriteError: The file cannot be written now.
  """
  if atomic_files.is_local(path):
    return atomic_files.Records(path, data, note)
  return _Uploads(path, data, note, guard)


class _Uploads(atomic_files.Records):
  """Records of which a thread writes all that came, every `SECONDS`."""

  def __init__(self, path, data, note, guard):
    super().__init__(path, data, note)
    self._whole, self._guard = data, guard
    self._ends, self._wakes = False, threading.Event()
    self._thread = threading.Thread(
      target=self._upload, name="upload", daemon=True
    )
    self._thread.start()

  def append(self, record: bytes) -> None:
    """Keeps a record for the next upload.

    Raises:
      WriteError: As `files.Records.append`.
    """
    self._waiting.append(record)
    self._refuse_too_many()

  def due(self) -> None:
    """Uploads now, without waiting for it."""
    self._wakes.set()

  def close(self) -> str | None:
    """Does as `files.Records.close`, unless the folder is another run's."""
    self._ends = True
    self._wakes.set()
    self._thread.join()
    try:
      self._guard()
    except OSError:
      return None
    return super().close()

  def _upload(self) -> None:
    while not self._ends:
      self._wakes.wait(SECONDS)
      self._wakes.clear()
      if self._ends or not self._waiting:
        continue
      try:
        self._guard()
      except OSError:  # the loop meets it, too, and ends the run
        return
      self._try()

  def _write(self) -> None:
    count = len(self._waiting)  # more may come meanwhile, behind these
    whole = self._whole + b"".join(self._waiting[:count])
    atomic_files.write(self._path, whole)
    self._whole = whole
    self._wrote(count)

"""A disk that does not answer now is no damage of the checkpoints on it."""

import errno
import os
import pathlib

import numpy as np
import pytest
from etils import epath

from vit_jax.checkpointing import checkpointer, layout, retention


@pytest.fixture
def folder(tmp_path):
  """`checkpoints/` with steps 1 and 2, and the note of the last."""
  folder = epath.Path(tmp_path / "checkpoints")
  params = {"head": {"bias": np.arange(3, dtype="float32")}}
  for step in (1, 2):
    checkpointer.write_params(str(folder / str(step)), params, {"step": step})
  retention.note_newest(folder, 2)
  return folder


def failing(monkeypatch, number, call, where):
  """Lets a call fail on paths that have `where` in them."""
  owner, name = {
    "stat": (os, "stat"),
    "read": (type(epath.Path(os.curdir)), "read_bytes"),
  }[call]
  plain = getattr(owner, name)

  def fails(path, *args, **options):
    if where in str(path):
      raise OSError(number, os.strerror(number), str(path))
    return plain(path, *args, **options)

  monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize(
  "number, call",
  [(errno.ESTALE, "stat"), (errno.ESTALE, "read"), (errno.EACCES, "read")],
)
def test_no_answer_is_no_damage(folder, monkeypatch, number, call):
  failing(monkeypatch, number, call, "checkpoints/2/")
  with pytest.raises(OSError, match=os.strerror(number)):
    layout.damage(folder / "2")
  step, (error,) = retention.start(folder)
  assert step == 0 and f"Error: [Errno {number}]" in error
  assert error.startswith(f"{folder}: cannot be read (")
  assert sorted(os.listdir(folder)) == ["1", "2"]


def test_a_note_of_steps_that_are_gone_or_that_cannot_be_read(
  folder, monkeypatch
):
  for step in ("1", "2"):
    (folder / step).rmtree()
  assert "step 2 is gone" in retention.start(folder)[1][0]
  failing(monkeypatch, errno.ESTALE, "read", retention.NEWEST)
  assert "cannot be read (OSError" in retention.start(folder)[1][0]


def test_what_is_missing_is_damage(folder):
  pathlib.Path(folder / "2/params/_METADATA").unlink()
  assert layout.damage(folder / "2") == "params/_METADATA is missing"
  (folder / "1/metadata").rmtree()
  pathlib.Path(folder / "1/metadata").write_text("")
  assert layout.damage(folder / "1") == "metadata/ is missing"


def test_which_errors_are_damage():
  for error in (PermissionError(errno.EACCES, "denied"), MemoryError()):
    assert layout.damage_of(error) is None
  disk = OSError(errno.EIO, "disk")
  assert layout.damage_of(disk) == "OSError: [Errno 5] disk"
  assert layout.damage_of(ValueError("a\nb")) == "ValueError: a"


def test_expired():
  assert retention.expired([1, 2, 3, 4], [1, 2, 3, 4], 2, None) == [1, 2]
  assert retention.expired([1, 4], [1, 2, 3, 4], 2, None) == []
  assert retention.expired([4], [3, 4], 2, None) == []
  assert retention.expired([2, 4, 6, 7], [2, 4, 6, 7], 1, 2) == []
  assert retention.expired([2, 3, 6, 7], [2, 3, 6, 7], 1, 6) == [2, 3]
  # Step 6 is damaged, or its save failed and was tried again.
  assert retention.expired([4, 7, 8, 9], [4, 6, 7, 8, 9], 1, 6) == [4, 8]
  assert retention.expired([4, 7, 8, 9], [4, 7, 8, 9], 1, 6) == [4, 8]

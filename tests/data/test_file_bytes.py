"""A store that does not answer is no fault of a file."""

import builtins
import errno
import os

import numpy as np
import pytest
from kinds import encoded, photo

from vit_jax.batch import DataError
from vit_jax.data import decoding, file_bytes, pipeline, sources

OPS = "decode|resize((24, 40))"


@pytest.fixture
def failing(monkeypatch):
  """Returns a function (path, errors): opening it raises them, one by one."""
  errors, really = {}, builtins.open

  def opened(path, *args, **kwargs):
    numbers = errors.get(path if isinstance(path, int) else os.fsdecode(path))
    if numbers:
      number = numbers.pop(0)
      raise OSError(number, os.strerror(number))
    return really(path, *args, **kwargs)

  monkeypatch.setattr(builtins, "open", opened)
  return lambda path, *numbers: errors.setdefault(str(path), list(numbers))


@pytest.fixture
def waits(monkeypatch):
  waits = []
  monkeypatch.setattr(file_bytes.time, "sleep", waits.append)
  return waits


def test_an_error_that_passes(tmp_path, failing, waits):
  path = tmp_path / "a"
  path.write_bytes(b"text")
  failing(path, errno.EIO, errno.EIO)
  assert file_bytes.read(os.fsencode(path)) == (b"text", b"")
  assert waits == [1, 2]


def test_an_error_that_stays(tmp_path, failing, waits):
  path = tmp_path / "a"
  failing(path, *[errno.EIO] * 9)
  assert file_bytes.read(os.fsencode(path)) == (
    b"",
    b"cannot be read: Input/output error.",
  )
  assert waits == list(file_bytes.WAITS_SECONDS)


@pytest.mark.parametrize("name", ["ESTALE", "ETIMEDOUT", "ENOTCONN"])
def test_a_store_that_is_away(tmp_path, failing, waits, name):
  path, number = tmp_path / "a\nb", getattr(errno, name)
  failing(path, number)
  _, error = file_bytes.read(os.fsencode(path))
  assert error.decode() == (
    f"UNAVAILABLE: {tmp_path}/a\\nb: {os.strerror(number)}"
  )
  assert not waits


def _folder(root):
  for name in ("a", "b"):
    (root / name).mkdir()
    for i in range(3):
      (root / name / f"{i}.png").write_bytes(encoded(photo(24 + i), "PNG"))
  return sources.open_source(f"folder:{root}", "train+val")


def test_a_batch_is_read_again_when_the_store_answers(
  tmp_path, failing, monkeypatch, caplog
):
  source = _folder(tmp_path)
  (expected,) = pipeline.eval_batches(source, OPS, batch_size=6)
  path, waits = source.paths[2], []
  os.rename(path, tmp_path / "away")
  failing(path, *[errno.ESTALE] * 3)

  def wait(seconds):
    waits.append(seconds)
    if len(waits) == 3:
      os.rename(tmp_path / "away", path)

  monkeypatch.setattr(decoding.time, "sleep", wait)
  (batch,) = pipeline.eval_batches(source, OPS, batch_size=6)
  assert waits == [0.5, 1, 2] and batch["mask"].all()
  np.testing.assert_array_equal(batch["image"], expected["image"])
  (said,) = [r.getMessage() for r in caplog.records]
  assert said.endswith(
    f"UNAVAILABLE: {path}: Stale file handle; is tried again."
  )


def test_it_is_not_waited_for_for_ever(tmp_path, failing, monkeypatch):
  source = _folder(tmp_path)
  os.remove(source.paths[2])
  failing(source.paths[2], *[errno.ETIMEDOUT] * 9)
  monkeypatch.setattr(decoding, "FIRST_SECONDS", -1.0)  # is over at once
  with pytest.raises(DataError, match=r"reading 'folder:.*timed out"):
    list(pipeline.eval_batches(source, OPS, batch_size=6))

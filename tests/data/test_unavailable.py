"""Broken records, and stores that do not answer, in the middle of a run."""

import builtins
import dataclasses
import errno
import os

import numpy as np
import pytest
from kinds import encoded, photo, write_classes
from numbered import (
  OPS,
  Numbers,
  assert_same,
  global_batches,
  numbers,
  unusable,
)

from vit_jax.batch import DataError
from vit_jax.data import decoding, pipeline, sources
from vit_jax.data.tf_cpu import tf


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Damaged(Numbers):
  """As `Numbers`, but encoded, and one record is cut short."""

  broken: int

  def load(self, raw):
    record = super().load(raw)
    png = tf.io.encode_png(record["image"])
    is_bad = raw["index"] == self.broken
    png = tf.where(is_bad, tf.strings.substr(png, 0, 50), png)
    return {**record, "image": png}


@pytest.mark.slow
def test_a_broken_image_in_mid_run_shifts_nothing(caplog):
  good = global_batches(numbers(50), 8, start_step=1)
  seen = set(good[0]["index"].tolist())
  broken = next(i for i in good[4]["index"].tolist() if i not in seen)
  hits = [broken in batch["index"] for batch in good]
  assert not hits[0] and sum(hits) > 1
  source = numbers(50, Damaged, broken=broken)
  bad = global_batches(source, 8, start_step=1)
  (line,) = unusable(caplog)
  assert f"record {broken} of 'n', split 's'" in line
  for batch, expected in zip(bad, good, strict=True):
    is_bad = expected["index"] == broken
    np.testing.assert_array_equal(batch["mask"], ~is_bad)
    np.testing.assert_array_equal(batch["index"], expected["index"])
    np.testing.assert_array_equal(
      batch["image"][~is_bad], expected["image"][~is_bad]
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Far(Numbers):
  """As `Numbers`, whose store raises `errors[0]` while there is one."""

  errors: list

  def fetch(self, indices):
    def ask(indices):
      if self.errors:
        raise self.errors[0]
      return indices

    indices_again = tf.numpy_function(ask, [indices], tf.int64, stateful=True)
    return {"index": tf.ensure_shape(indices_again, indices.shape)}


ERRORS = (
  RuntimeError(f"pread() failed: {os.strerror(errno.ESTALE)}"),
  RuntimeError("UNAVAILABLE: the server does not answer"),
  tf.errors.UnavailableError(None, None, "HTTP 503"),
)


@pytest.mark.slow
def test_reading_waits_for_a_store(monkeypatch, caplog):
  waits, expected = [], global_batches(numbers(50), 2)
  source = numbers(50, Far, errors=[*ERRORS])

  def wait(seconds):
    waits.append(seconds)
    if len(waits) in (3, 5, 7):
      source.errors.pop(0)

  monkeypatch.setattr(decoding.time, "sleep", wait)
  batches = global_batches(source, 2)
  assert_same(batches, expected)
  assert all(batch["mask"].all() for batch in batches)
  assert waits == [0.5, 1, 2, 4, 8, 10, 10]
  assert f"{ERRORS[0]}; trying again" in caplog.text
  assert "Traceback" not in caplog.text


def test_reading_does_not_wait_for_ever(monkeypatch):
  monkeypatch.setattr(decoding, "RETRY_SECONDS", -1.0)  # over at once
  source = numbers(50, Far, errors=[])
  batches = pipeline.train_batches(source, OPS, batch_size=16, seed=0)
  next(batches)
  source.errors.append(RuntimeError("UNAVAILABLE: it does not answer"))
  with pytest.raises(DataError, match="reading 'n' .*it does not answer"):
    for _ in range(100):
      next(batches)


@pytest.mark.slow
def test_reading_waits_for_a_file_of_a_folder(tmp_path, monkeypatch, caplog):
  dataset = write_classes(tmp_path, {"0.png": encoded(photo(), "PNG")})
  source = sources.open_source(dataset, "train+val")
  ops = "decode|resize((24, 40))"
  (expected,) = pipeline.eval_batches(source, ops, batch_size=4)
  path, waits, really = source.paths[0], [], builtins.open
  os.rename(path, tmp_path / "away")

  def opened(file, *args, **kwargs):
    if len(waits) < 3 and file == os.fsencode(path):
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return really(file, *args, **kwargs)

  def wait(seconds):
    waits.append(seconds)
    if len(waits) == 3:
      os.rename(tmp_path / "away", path)

  monkeypatch.setattr(builtins, "open", opened)
  monkeypatch.setattr(decoding.time, "sleep", wait)
  (batch,) = pipeline.eval_batches(source, ops, batch_size=4)
  assert waits == [0.5, 1, 2] and batch["mask"].all()
  np.testing.assert_array_equal(batch["image"], expected["image"])
  # Others: asyncio's, about saves that earlier tests made fail.
  (line,) = (text for text in caplog.messages if path in text)
  assert "Stale file handle" in line

"""Broken records and stores that do not answer, in the midst of a run."""

import dataclasses
import errno
import os

import numpy as np
import pytest
from numbered import OPS, Numbers, assert_same, global_batches, numbers

from vit_jax.batch import DataError
from vit_jax.data import pipeline
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


@pytest.mark.parametrize(
  "processes", [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_broken_image_in_mid_run_shifts_nothing(processes, caplog):
  good = global_batches(numbers(50), 8, processes, start_step=1)
  seen = set(good[0]["index"].tolist())
  broken = next(i for i in good[4]["index"].tolist() if i not in seen)
  hits = [broken in batch["index"] for batch in good]
  assert not hits[0] and sum(hits) > 1
  source = Damaged(
    name="n", split="s", num_examples=50, num_classes=7, broken=broken
  )
  bad = global_batches(source, 8, processes, start_step=1)
  assert len(caplog.records) == 1
  assert f"Cannot use record {broken} of 'n', split 's'" in caplog.text
  for batch, expected in zip(bad, good, strict=True):
    is_bad = expected["index"] == broken
    np.testing.assert_array_equal(batch["mask"], ~is_bad)
    np.testing.assert_array_equal(batch["index"], expected["index"])
    np.testing.assert_array_equal(
      batch["image"][~is_bad], expected["image"][~is_bad]
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Far(Numbers):
  """As `Numbers`, from a store that raises the errors, once each."""

  errors: list

  def fetch(self, indices):
    def ask(indices):
      if self.errors:
        raise self.errors.pop()
      return indices

    found = tf.numpy_function(ask, [indices], tf.int64, stateful=True)
    return {"index": tf.ensure_shape(found, indices.shape)}


AWAY = RuntimeError("UNAVAILABLE: the server does not answer")


def far(errors):
  return Far(name="n", split="s", num_examples=50, num_classes=7, errors=errors)


@pytest.mark.parametrize(
  "error",
  [
    RuntimeError(f"pread() failed: {os.strerror(errno.ESTALE)}"),
    *(
      pytest.param(error, marks=pytest.mark.slow)
      for error in [
        AWAY,
        tf.errors.UnavailableError(None, None, "HTTP 503"),
        RuntimeError(f"pread() failed: {os.strerror(errno.EIO)}"),
      ]
    ),
  ],
)
def test_a_store_that_does_not_answer_is_waited_for(monkeypatch, caplog, error):
  waits, expected = [], global_batches(numbers(50), 8)
  monkeypatch.setattr(pipeline.decoding.time, "sleep", waits.append)
  source = far([error] * 100)
  found = global_batches(source, 8)
  assert_same(found, expected)
  assert all(batch["mask"].all() for batch in found) and not source.errors
  times = [0.5, 1, 2, 4, 8, *[10] * 100]  # several are asked for at once
  assert len(waits) > 1 and waits == times[: len(waits)]
  assert f"{type(error).__name__}: {error}; is tried again" in caplog.text
  assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
  "first, limit", [(0, "FIRST_SECONDS"), (2, "AWAY_SECONDS")]
)
def test_it_is_not_waited_for_for_ever(monkeypatch, first, limit):
  monkeypatch.setattr(pipeline.decoding, limit, -1.0)  # is over at once
  source = far([])
  batches = pipeline.train_batches(source, OPS, batch_size=16, seed=0)
  for _ in range(first):
    next(batches)
  source.errors[:] = [AWAY] * 1000
  with pytest.raises(DataError, match="reading 'n' .*the server does not"):
    for _ in range(100):
      next(batches)


def test_an_error_of_the_disk_is_waited_for_a_few_seconds(monkeypatch):
  monkeypatch.setattr(pipeline.decoding.file_bytes, "WAITS_SECONDS", (-1.0,))
  source = far([RuntimeError(f"pread() failed: {os.strerror(errno.EIO)}")] * 99)
  batches = pipeline.train_batches(source, OPS, batch_size=16, seed=0)
  with pytest.raises(DataError, match="reading 'n' .*Input/output error"):
    for _ in range(100):
      next(batches)

"""From step to step, and evaluation to evaluation, nothing piles up."""

import gc
import os
import threading

import jax
import pytest
import tiny

from vit_jax import train
from vit_jax.config import Config, defaults, freeze, to_dict

OPS = "decode|resize(16)"


def _config() -> Config:
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=18)))
  c.data.dataset = "digits"
  c.log_steps = c.checkpoint.every_steps = 3
  splits = {"split": "test[:20]", "train_split": "train[:40]"}
  few = {"kind": "fewshot", "ops": OPS, "shots": (1,), "l2": (1.0,), **splits}
  c.evals = {"few": {**few, "every_steps": 3}}
  return freeze(c)


class Counts:
  """Counts open files, threads and arrays at each evaluation."""

  def __init__(self):
    self.rows = []

  def write_scalars(self, step, scalars):
    if "few/1shot" in scalars:
      gc.collect()
      files = len(os.listdir("/proc/self/fd"))
      arrays = len(jax.live_arrays())
      self.rows.append((files, threading.active_count(), arrays))

  def flush(self):
    pass

  def close(self):
    pass


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_six_evaluations_and_checkpoints_leave_nothing(tmp_path):
  counts = Counts()
  train.train_and_evaluate(_config(), str(tmp_path), writer=counts)
  assert len(counts.rows) == 6
  files, threads, arrays = zip(*counts.rows, strict=True)
  assert min(arrays[3:]) <= min(arrays[1:3]), arrays
  for kind, values in (("open files", files), ("threads", threads)):
    # A save that is under way has some of its own.
    assert min(values[3:]) <= min(values[1:3]) + 1, (kind, values)
    assert max(values[3:]) <= max(values[1:3]) + 4, (kind, values)

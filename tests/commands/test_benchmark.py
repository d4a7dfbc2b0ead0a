"""The benchmark times the step that trains, and says what it timed."""

import itertools
import json
import math
import subprocess
import sys
import threading

import jax
import pytest
import tiny

from vit_jax import step as step_lib
from vit_jax.callbacks.throughput import Throughput
from vit_jax.config import ConfigError
from vit_jax.tools import benchmark


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch):
  monkeypatch.setitem(benchmark.MATMULS, "cpu", ((32, 64), 2))


@pytest.mark.slow
def test_it_measures_the_step():
  config = tiny.config(num_classes=tiny.NUM_CLASSES, model__depth=1)
  result = benchmark.measure(config, steps=21)
  assert json.loads(json.dumps(result)) == result
  assert (result["steps"], result["block_steps"]) == (20, 5)
  assert result["devices"] == result["mesh"]["data"] == 8
  least, most = result["step_seconds_least"], result["step_seconds_most"]
  assert 0 < least <= result["step_seconds"] <= most
  per_image = config.model.train_flops((16, 16), tiny.NUM_CLASSES)
  assert result["flops_per_image"] == per_image
  rate = 16 / result["step_seconds"]
  assert result["images_per_second"] == pytest.approx(rate)
  done = result["mfu"] * result["ceiling_flops"]
  assert done == pytest.approx(rate * per_image / 8)
  params = tiny.Parts(config).shapes.params
  assert result["params"] == sum(x.size for x in jax.tree.leaves(params))
  assert result["peak_bytes"] > 3 * 4 * result["params"]  # weights and moments
  assert result["peak_bytes_by"] == "compiler" and result["peak_flops"] is None
  assert math.isfinite(result["loss"]) and result["input_wait"] is None
  table = benchmark.table(result)
  assert f"\nspeed       {result['images_per_second']:,.1f} images/s," in table


class Result:
  """What a device computes until `end`, on a clock that each thread has."""

  clock = threading.local()

  def __init__(self, end):
    self._end = end

  def block_until_ready(self):
    self.clock.now = max(self._end, getattr(self.clock, "now", 0.0))
    return self

  def __float__(self):
    return 0.5


def test_blocks_are_timed_by_when_steps_end(monkeypatch):
  """The loop itself learns of it later, as dispatching a step blocks it."""
  now = lambda: getattr(Result.clock, "now", 0.0)
  monkeypatch.setattr(benchmark.time, "perf_counter", now)

  def step(number, batch):
    assert batch["number"] == number
    Result(2.0 * number).block_until_ready()  # till the step before has ended
    return number + 1, {"loss": Result(2.0 * (number + 1))}

  batches = ({"number": n} for n in itertools.count())
  throughput = Throughput(1, 1, 1, None)
  seconds, wait, loss = benchmark.run(
    step, 0, batches, throughput, warmup=3, block=2, steps=10
  )
  assert seconds == [2.0] * 5
  assert 0 <= wait <= 1 and loss == 0.5


def test_too_large_a_batch_is_an_error(monkeypatch):
  def full(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nx")

  monkeypatch.setattr(step_lib, "assemble", full)
  config = tiny.config(num_classes=tiny.NUM_CLASSES)
  with pytest.raises(ConfigError, match="got 16, expected one that fits"):
    benchmark.measure(config)


@pytest.mark.nightly
def test_on_real_input():
  command = [sys.executable, "-m", "vit_jax", "benchmark", "--input=real"]
  command += ["--config=configs/digits_finetune.py", "--steps=20", "--json"]
  command += ["--fake_data", "--config.data.batch_size=16"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  result = json.loads(done.stdout)
  assert result["input"] == "real" and 0 <= result["input_wait"] <= 1
  assert result["steps"] == 20 and math.isfinite(result["loss"])

"""Learning rates in closed form: at 0, in and after the warm-up, at the end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import schedules
from vit_jax.config import OptimConfig

TOTAL, WARMUP, PEAK, END = 1000, 100, 3e-3, 1e-5
CONFIG = OptimConfig(
  lr=PEAK,
  warmup_steps=WARMUP,
  end_lr=END,
  decay_at=(0.4, 0.55),
)
ALL = ("cosine", "linear", "rsqrt", "constant", "step")


def _want(name, step):
  """The rule as big_vision writes it: decay times min(1, step / warm-up)."""
  progress = min(max((step - WARMUP) / (TOTAL - WARMUP), 0.0), 1.0)
  since = max(step - WARMUP, 0)
  decay = {
    "cosine": END + (PEAK - END) * 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": END + (PEAK - END) * (1 - progress),
    "rsqrt": PEAK / math.sqrt(1 + since / 10_000),
    "constant": PEAK,
    # Steps 399 and 400, 549 and 550 are on the two sides of a division.
    "step": PEAK / 10 ** sum(step >= s * TOTAL for s in (0.4, 0.55)),
  }[name]
  return decay * min(1.0, step / WARMUP)


@pytest.mark.parametrize("name", ALL)
def test_closed_form(name):
  config = dataclasses.replace(CONFIG, schedule=name)
  lr = schedules.make_schedule(config, TOTAL)
  steps = [0, 1, 50, 99, 100, 101, 399, 400, 549, 550, 999, 1000, 1200]
  want = [_want(name, s) for s in steps]
  assert float(lr(0)) == 0.0 and float(lr(WARMUP)) == np.float32(PEAK)
  got = jax.jit(jax.vmap(lr))(jnp.array(steps))
  assert got.dtype == jnp.float32
  # cos of a float32 angle is good to 1e-7 of the peak, not of a small rate.
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-7 * PEAK)
  # Without a warm-up the first update has the peak.
  for peak in (PEAK, 0.0):
    config = dataclasses.replace(config, lr=peak, warmup_steps=0)
    assert float(schedules.make_schedule(config, TOTAL)(0)) == np.float32(peak)


def test_steps_of_a_short_run_may_coincide():
  config = dataclasses.replace(
    CONFIG, schedule="step", warmup_steps=0, decay_at=(0.3, 0.6, 0.7)
  )
  schedule = schedules.make_schedule(config, 3)  # after 1, 2 and 2 updates
  rates = [float(schedule(s)) / PEAK for s in range(3)]
  assert rates == pytest.approx([1, 0.1, 0.001], rel=1e-6)


def stairs(lr, warmup_steps, total_steps, height=1.0):
  return lambda step: lr * height * (step // warmup_steps) / total_steps


def twice(lr, warmup_steps, total_steps):
  return lambda step: jnp.array([lr, lr])


def _imported(text):
  config = dataclasses.replace(CONFIG, schedule=f"{__name__}:{text}")
  return schedules.make_schedule(config, TOTAL)


def test_an_imported_schedule_decides_the_warmup():
  lr = _imported("stairs(height=3)")
  got = [float(lr(s)) for s in (0, WARMUP - 1, WARMUP, TOTAL)]
  want = [0.0, 0.0, 3 * PEAK / TOTAL, 3 * PEAK * 10 / TOTAL]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert jax.jit(lr)(3).dtype == jnp.float32


@pytest.mark.parametrize(
  ("text", "word"),
  [
    ("stair", "'stairs'"),
    ("stairs(width=3)", "'width'"),
    ("stairs(height='a')", "TypeError"),
    ("WARMUP", "TypeError"),
    ("twice", r"\(2,\)"),
  ],
)
def test_errors_of_imported_schedules(text, word):
  with pytest.raises(ValueError, match=f"config.optim.schedule: .*{word}"):
    _imported(text)

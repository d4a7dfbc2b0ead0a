"""Estimated time of a program, from its text and XLA's own costs."""

import math
import types

import pytest
from planning.test_hlo import LOOP

from vit_jax.devices import CHIPS
from vit_jax.planning.hlo import Module
from vit_jax.planning.price import price

V5E = CHIPS["v5e"]


def priced(optimal_seconds):
  costs = {"optimal_seconds": optimal_seconds, "flops": 0, "bytes accessed": 1}
  program = types.SimpleNamespace(
    as_text=lambda: LOOP, cost_analysis=lambda: costs
  )
  return price(program, V5E)


def test_the_roofline_of_a_loop_counts_every_trip():
  looped, once = Module(LOOP).totals(V5E)
  found = priced(1.0)
  assert found["optimal_seconds"] == looped.roof_seconds / once.roof_seconds
  # 135 cycles, and an all-reduce.
  cycles = 135 / V5E.clock + looped.link_seconds(V5E)
  assert found["cycles_seconds"] == pytest.approx(cycles)
  assert found["price_seconds"] == math.sqrt(
    found["cycles_seconds"] * found["optimal_seconds"]
  )


def test_the_roofline_is_no_less_than_what_instructions_take_at_full_rates():
  looped, _ = Module(LOOP).totals(V5E)
  assert priced(1e-12)["optimal_seconds"] == looped.roof_seconds

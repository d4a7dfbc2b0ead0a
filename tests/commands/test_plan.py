"""The command `vit-jax plan`."""

import doctest
import math
import re

import pytest
from planning.test_planner import needs_libtpu

from vit_jax.commands import plan as plan_command
from vit_jax.tools.planning import plan


def test_examples():
  assert doctest.testmod(plan).failed == 0


@pytest.mark.slow
@needs_libtpu
def test_libtpu_knows_the_slices_of_the_help():
  for topology in re.findall(r"\w+:[\dx]+", plan_command.FLAGS["topology"]):
    chip, devices = plan.describe(topology)
    sides = map(int, topology.split(":")[1].split("x"))
    assert len(devices) * chip.share == math.prod(sides)

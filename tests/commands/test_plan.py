"""The command `vit-jax plan`."""

import doctest
import math
import re
import subprocess
import sys
import time

import pytest
import tiny
from planning.test_planner import PLAN, needs_libtpu

from vit_jax.commands import plan as plan_command
from vit_jax.config import cli
from vit_jax.devices import CHIPS
from vit_jax.tools.planning import plan
from vit_jax.tools.planning.plan import table


def test_examples():
  assert doctest.testmod(plan).failed == 0


def test_help_names_every_family_of_slices():
  names = re.findall(r"(\w+):\d", plan_command.FLAGS["topology"])
  assert names == list(CHIPS)


@pytest.mark.slow
@needs_libtpu
def test_libtpu_knows_the_slices_of_the_help():
  for topology in re.findall(r"\w+:[\dx]+", plan_command.FLAGS["topology"]):
    chip, devices = plan.describe(topology)
    sides = map(int, topology.split(":")[1].split("x"))
    assert len(devices) * chip.share == math.prod(sides)


@pytest.mark.slow
@needs_libtpu
def test_libtpu_prints_no_stack_when_ended():
  command = [sys.executable, "-m", "vit_jax", "plan", "--topology=v5e:2x2"]
  command += ["--config=configs/vit_b16.py"]
  process = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  assert process.stderr.readline().startswith("compiling ")
  time.sleep(5)  # it compiles for minutes
  process.terminate()
  _, output = process.communicate()
  assert process.returncode == 143
  *before, last = output.splitlines()
  assert last.startswith("SIGTERM: ended; ")
  assert all(line.startswith("compiling ") for line in before)


def test_the_command_says_what_takes_minutes_then_prints_the_plan(
  monkeypatch, capsys
):
  monkeypatch.setattr(plan, "describe", lambda _: (CHIPS["v5e"], [None] * 8))
  monkeypatch.setattr(plan.planner, "plan", lambda *_, **__: PLAN)
  monkeypatch.setattr(plan.signals, "end_at_once", lambda *_: None)
  flags = dict.fromkeys(plan_command.FLAGS) | {"topology": "v5e:2x4"}
  plan.main(cli.Args(tiny.config(), "tiny", flags, []))
  output = capsys.readouterr()
  assert output.err.startswith("compiling the train step for v5e:2x4,")
  assert output.out == table(PLAN) + "\n"


def test_prices_begin_with_a_number_and_rates_are_above_zero():
  for text in ("cheap", "-1"):
    with pytest.raises(ValueError, match="expected a number"):
      plan.parse_price(text)
  for text in ("0", "inf", "many"):
    with pytest.raises(ValueError, match="--input_rate"):
      plan.parse_input_rate(text)

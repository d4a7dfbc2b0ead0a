"""Ctrl-C and SIGTERM end a process at once, whatever C code is at work."""

import json
import signal

import pytest
import several

# What no handler of Python interrupts: C code that holds the main thread.
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"

ONE = f"""
import hashlib
from vit_jax.distributed import signals

signals.end_at_once(lambda: "half done")
work = lambda: (print("begun", flush=True), {BUSY})
signals.in_thread(work)
"""

# A planner whose compiler takes a moment for the first choice, and hours for
# the second.
SEARCH = f"""
import hashlib, sys
import tiny
from planning.test_planner import PLAN
from vit_jax.tools.planning import plan
from vit_jax.config import cli
from vit_jax.devices import CHIPS
from vit_jax.tools.planning import planner

config = tiny.config(data__dataset="cifar10", data__batch_size=64)
plan.describe = lambda topology: (CHIPS["v5e"], [None] * 4)
plan_of = PLAN | dict(images_per_second=128.0)
calls = []

def slow(choice, topology, **_):
  calls.append(choice)
  if len(calls) == 2:
    {BUSY}
  return plan_of

planner.plan = slow
flags = dict.fromkeys(["input_rate", "price_per_chip_hour"])
flags |= dict(topology="v5e:2x2", search="true", json=sys.argv[1])
plan.main(cli.Args(config, "tiny", flags, []))
"""


# What a shell starts in the background ignores Ctrl-C, and hands that down.
HEED = "import signal\nsignal.signal(2, signal.default_int_handler)\n"


@pytest.mark.parametrize(
  "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_one_line_and_the_status(number, status):
  with several.program(HEED + ONE) as process:
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
  assert message == f"{number.name}: ended; half done\n"
  assert process.returncode == status


RAISES = """
from vit_jax.distributed import signals
print(signals.in_thread(lambda: 3))
signals.in_thread(lambda: 1 / 0)
"""


def test_what_the_work_returns_and_raises():
  with several.program(RAISES) as process:
    out, err = process.communicate(timeout=30)
  assert out == "3\n" and process.returncode == 1
  assert err.endswith("ZeroDivisionError: division by zero\n")


BLOCKED = """
import os, signal
from vit_jax.distributed import signals
signal.signal(signal.SIGINT, signal.SIG_IGN)
signals.end_at_once()
with signals.blocked():
  os.kill(os.getpid(), signal.SIGTERM)
  os.kill(os.getpid(), signal.SIGINT)
  print("still here")
  signals.end_at_once(lambda: "by the new handler")
signal.pause()
"""


def test_a_signal_waits_while_blocked_and_an_ignored_one_is_ignored():
  with several.program(BLOCKED) as process:
    out, err = process.communicate(timeout=30)
  assert (out, process.returncode) == ("still here\n", 143)
  assert err == "SIGTERM: ended; by the new handler\n"


@pytest.mark.slow
def test_a_search_that_is_ended_prints_the_fastest_choice():
  # JSON on stdout, the choices on stderr.
  with several.program(HEED + SEARCH, "true") as process:
    lines = [process.stderr.readline() for _ in range(2)]
    assert "16 choices" in lines[0] and lines[1].startswith("[ 1/16] ")
    assert process.stderr.read(8) == "[ 2/16] "  # which is being compiled
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
  assert process.returncode == -signal.SIGINT
  last = err.splitlines()[-1]
  assert last.startswith("SIGINT: ") and "2 of 16; fastest so far" in last
  assert json.loads(out)["images_per_second"] == 128.0

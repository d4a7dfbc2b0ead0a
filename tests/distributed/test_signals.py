"""A process ends at once by a signal, or with its code, whatever is at work."""

import json
import signal

import jax
import pytest
import several

from vit_jax.distributed import exit_codes


def ended(code, *, at=None, number=None, **options):
  """Returns (status, stdout, stderr) of a program that a signal may end.

  Args:
    code: The program.
    at: What it prints before it gets the signal.
    number: The signal.
    options: See `several.program`.
  """
  # What a shell starts in the background ignores Ctrl-C, and hands that down.
  heed = "import signal\nsignal.signal(2, signal.default_int_handler)\n"
  with several.program(heed + code, **options) as process:
    if at:
      assert process.stdout.readline() == at
      process.send_signal(number)
    out, err = process.communicate(timeout=60)
  return process.returncode, out, err


# What no handler of Python interrupts: C code that holds the main thread.
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"
ONE = f"""
import hashlib
from vit_jax.distributed import signals

signals.end_at_once(lambda: "half done")
work = lambda: (print("begun", flush=True), {BUSY})
signals.in_thread(work)
"""


@pytest.mark.parametrize(
  "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_one_line_and_the_status(number, status):
  message = f"{number.name}: ended; half done\n"
  assert ended(ONE, at="begun\n", number=number) == (status, "", message)


RAISES = """
from vit_jax.distributed import signals
print(signals.in_thread(lambda: 3))
signals.in_thread(lambda: 1 / 0)
"""
BLOCKED = """
import os
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


def test_what_the_work_returns_and_raises():
  status, out, err = ended(RAISES)
  assert (status, out) == (1, "3\n")
  assert err.endswith("ZeroDivisionError: division by zero\n")


def test_a_signal_waits_while_blocked_and_an_ignored_one_is_ignored():
  message = "SIGTERM: ended; by the new handler\n"
  assert ended(BLOCKED) == (143, "still here\n", message)


CODE = """
import threading, time
from vit_jax.distributed import exit_codes as exits
exits.CLOSING_SECONDS = 0.5
threading.Thread(target=time.sleep, args=[60]).start()  # Python would wait

def full():
  raise OSError("no space left")

def end():
  exits.end(
    exits.EXIT_HUNG, full, lambda: print("called"), lambda: time.sleep(60),
    lambda: print("too late"),
  )

threading.Thread(target=end).start()
print("a text", end="")
time.sleep(60)
"""
# A run goes on when the connection that started it is closed: stderr is a pipe
# without a reader.
UNHEARD = """
import os
from vit_jax.distributed import exit_codes as exits
from vit_jax.callbacks import progress

inside, outside = os.pipe()
os.dup2(outside, 2)
os.close(inside)
os.close(outside)
shown = progress.Progress(2)
shown.on_start(0, None, {})
shown.on_step(1, {}, {})
shown.on_log(1, {"loss": 1.0})
progress.note("a note")
exits.say("a word")
print("trained")
"""


def test_what_hangs_or_fails_keeps_no_process():
  status, out, err = ended(CODE)
  assert (status, err) == (124, "OSError: no space left\n")
  assert "a text" in out and "called" in out and "too late" not in out


@pytest.mark.slow
def test_a_run_that_nobody_hears_goes_on():
  assert ended(UNHEARD)[:2] == (0, "trained\n")


def test_one_of_several_processes_without_a_device(monkeypatch, capfd):
  """No stack before the sentence of `__main__`, and no second try to start."""
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(jax, "process_index", lambda: 1 / 0)
  error = RuntimeError("Unable to initialize backend 'tpu': no libtpu")
  exit_codes.end_if_joined(error, 1.0)
  assert capfd.readouterr() == ("", "")


# A planner whose compiler takes a moment for the first choice, and hours for
# the second.
SEARCH = f"""
import hashlib
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
    print("compiles", flush=True)
    {BUSY}
  return plan_of

planner.plan = slow
flags = dict.fromkeys(["input_rate", "price_per_chip_hour"])
flags |= dict(topology="v5e:2x2", search="true", json="true")
plan.main(cli.Args(config, "tiny", flags, []))
"""


@pytest.mark.slow
def test_a_search_that_is_ended_prints_the_fastest_choice():
  """JSON on stdout, the choices on stderr."""
  status, out, err = ended(SEARCH, at="compiles\n", number=signal.SIGINT)
  assert status == -signal.SIGINT
  *choices, last = err.splitlines()
  assert "16 choices" in choices[0] and choices[1].startswith("[ 1/16] ")
  assert last.startswith("SIGINT: ") and "2 of 16; fastest so far" in last
  assert json.loads(out)["images_per_second"] == 128.0

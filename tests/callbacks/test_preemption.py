"""Where a run stops after a signal, and what a second one does."""

import contextlib
import signal
import time

import pytest
import several
from jax.experimental import multihost_utils

from vit_jax.callbacks.base import Stop
from vit_jax.callbacks.preemption import Preemption
from vit_jax.distributed.signals import StopSignals


@pytest.fixture
def received():
  signals = StopSignals()
  yield signals
  signals.close()


def test_a_signal_stops_the_next_step_or_batch_of_an_evaluation(received):
  callback = Preemption(received)
  callback.on_step(1, {}, {})
  callback.check_stop(1)
  assert not callback.stop_requested()
  received.received = "SIGTERM"
  assert callback.stop_requested()
  for check in (callback.on_eval_batch, lambda: callback.check_stop(2)):
    with pytest.raises(Stop, match="stopped by SIGTERM"):
      check()


def test_several_processes_stop_where_jax_has_them_agree(monkeypatch):
  """The number of checks is the same in all: steps, batches of evaluations."""
  places = []
  monkeypatch.setattr(
    multihost_utils,
    "reached_preemption_sync_point",
    lambda place: places.append(place) or place == 4,
  )
  callback = Preemption()
  callback.check_stop(101)
  callback.on_eval_batch()
  callback.on_eval_batch()
  with pytest.raises(Stop, match="SIGTERM"):
    callback.check_stop(102)
  assert places == [1, 2, 3, 4]


# A main thread that no handler of Python interrupts, as a compiler is; or one
# that sleeps.
BUSY = """
import hashlib, signal, sys, time
signal.signal(2, signal.default_int_handler)  # a background job ignores it
from vit_jax.callbacks import preemption
from vit_jax.distributed import signals
signals.REPEAT_SECONDS = 0.3
received = signals.StopSignals()
callback = preemption.Preemption(received)
if sys.argv[1] == "later":
  callback.on_step(3, {}, {})
received.on_exit = lambda text: print(text, flush=True)
signal.signal(15, lambda *_: print("a library's"))
received.install()
print("begun", flush=True)
if sys.argv[2] == "sleeps":
  time.sleep(60)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
"""


@contextlib.contextmanager
def _busy(when, how="computes"):
  with several.program(BUSY, when, how) as process:
    assert process.stdout.readline() == "begun\n"
    yield process


def test_a_first_signal_ends_a_compiling_process_at_once():
  with _busy("before") as process:
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
  assert process.returncode == 75 and out == err and "SIGTERM before" in out


@pytest.mark.parametrize(
  "number, how, status",
  [
    (signal.SIGTERM, "computes", 143),
    (signal.SIGINT, "sleeps", -signal.SIGINT),
  ],
)
def test_a_second_signal_ends_it_at_once_and_an_echo_does_not(
  number, how, status
):
  with _busy("later", how) as process:
    process.send_signal(signal.SIGTERM)
    line = process.stderr.readline()
    assert line.startswith("SIGTERM: ") and "step 3" in line
    process.send_signal(signal.SIGTERM)  # as a launcher repeats it
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
  assert err == out and out.startswith(f"{number.name} again: ")
  assert process.returncode == status

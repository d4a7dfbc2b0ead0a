"""Where a run stops after a notice, in all its processes alike."""

import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from vit_jax.callbacks import preemption
from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.preemption import Notices, Place, Stop, agreed, answer
from vit_jax.distributed import exit_codes

ROOT = pathlib.Path(__file__).parents[2]


def test_they_agree_on_a_check_that_none_has_passed():
  assert agreed([Place(7, 3), Place(9, 4), Place(8, 4)]) == 10
  assert agreed([Place(7, 3)]) == 8


def test_who_has_no_update_yet_ends_at_once():
  """Without its part no update of the others can be complete."""
  assert agreed([Place(1, 1), Place(0, 0)]) is None


def _running(**options):
  notices = Notices(Phases(), **options)
  notices.phases.beat(1)
  return notices


def test_a_notice_stops_the_next_check_and_is_given_once():
  notices = _running()
  notices.check()
  notices.check_last()
  notices.notice("SIGTERM")
  notices.notice("SIGINT")
  with pytest.raises(Stop) as stop:
    notices.beat()
  assert str(stop.value) == "stopped by SIGTERM"
  stop.value.step = 1200
  assert "at step 1,200, which is saved" in str(stop.value)
  with pytest.raises(Stop, match="SIGTERM"):
    notices.check_last()


def test_before_the_first_update_it_ends_at_once_or_at_the_first_check():
  reasons = []
  notices = Notices(Phases(), reasons.append)
  notices.notice("SIGTERM")
  assert reasons == ["SIGTERM"]
  waiting = threading.Thread(target=notices.check, daemon=True)
  waiting.start()  # no step begins while the process is about to end
  waiting.join(0.05)
  assert waiting.is_alive()
  notices = Notices()  # of a program that must not be ended by us
  notices.notice("the host's own")
  with pytest.raises(Stop, match="the host's own"):
    notices.check()


def test_a_notice_waits_until_the_processes_are_joined():
  asked = []
  notices = _running()
  notices.wait_to_join()
  notices.notice("SIGTERM")
  notices.check()
  notices.join(asked.append)
  assert asked == ["SIGTERM"]


@pytest.mark.parametrize("seed", range(5))
def test_all_stop_at_the_same_check_however_they_run_apart(seed):
  """Three loops of different speed, of which one has the notice."""
  loops = [_running() for _ in range(3)]
  stopped = [None] * 3

  def ask(reason):
    at = agreed([notices.hold(reason) for notices in loops])
    for notices in loops:
      notices.release(at)

  def run(i):
    try:
      while True:
        time.sleep(0.0003 * (1 + (i + seed) % 3))
        loops[i].check()
    except Stop:
      stopped[i] = loops[i].checks

  for notices in loops:
    notices.join(ask)
  threads = [threading.Thread(target=run, args=[i]) for i in range(3)]
  for thread in threads:
    thread.start()
  time.sleep(0.02)
  loops[seed % 3].notice("SIGTERM")
  for thread in threads:
    thread.join(10)
  assert len(set(stopped)) == 1 and stopped[0] > 0


@pytest.mark.parametrize(
  "phase, step, words",
  [
    ("start", 0, "before the first step; nothing is lost"),
    ("compile", 0, "before the first step; nothing is lost"),
    ("step", 12, "at step 12; the state is saved at the next step"),
    ("input", 12, "the state is saved at the next step"),
    ("evaluation", 12, "the evaluation is given up"),
    ("save", 12, "the checkpoint is completed"),
  ],
)
def test_the_answer_is_true_of_the_phase(phase, step, words):
  phases = Phases()
  phases.enter(phase)
  phases.beat(step)
  assert words in answer(phases) and "exit code 75" in answer(phases)


def test_a_terminal_that_is_held_up_does_not_hold_up_a_notice(monkeypatch):
  is_read = threading.Event()
  monkeypatch.setattr(exit_codes, "say", lambda text: is_read.wait(60))
  monkeypatch.setattr(preemption, "SAY_SECONDS", 0.1)
  signals, notices = preemption.Signals(), _running()
  signals.notices = notices
  try:
    signals._hear(signal.SIGTERM)
    assert not is_read.is_set() and notices.reason == "SIGTERM"
  finally:
    is_read.set()


# A main thread that no handler of Python interrupts, as a compiler is.
BUSY = """
import hashlib, signal, sys
signal.signal(2, signal.default_int_handler)  # else a background job ignores it
from vit_jax.callbacks import preemption
preemption.ONE_NOTICE = 0.3
signals = preemption.Signals()
if sys.argv[1] == "later":
  signals.notices = preemption.Notices()
  signals.notices.phases.beat(3)
signals.last_acts = lambda words: print(words, flush=True)
signal.signal(15, lambda *_: print("a library's"))
signals.install()
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
"""


@pytest.fixture
def busy():
  started = []

  def start(when):
    started.append(
      subprocess.Popen(
        [sys.executable, "-c", BUSY, when],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
      )
    )
    assert started[0].stdout.readline() == "begun\n"
    return started[0]

  yield start
  for process in started:
    process.kill()
    process.communicate()


def test_a_first_signal_ends_a_compiling_process_at_once(busy):
  process = busy("before")
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=10)
  assert process.returncode == 75 and out == ""
  assert err.startswith("SIGTERM: received before the first step; nothing is")


@pytest.mark.parametrize(
  "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_second_signal_ends_it_at_once_and_an_echo_does_not(
  busy, number, status
):
  process = busy("later")
  process.send_signal(signal.SIGTERM)
  assert "SIGTERM: received at step 3; " in process.stderr.readline()
  process.send_signal(signal.SIGTERM)  # as a launcher repeats it
  time.sleep(0.5)
  assert process.poll() is None
  process.send_signal(number)
  out, err = process.communicate(timeout=10)
  words = f"{number.name} again: ended at once, nothing more is saved\n"
  assert (err, out) == (words, words)
  assert process.returncode == status

"""A process without progress ends; a slow one does not."""

import threading

import several

from vit_jax.callbacks import watchdog


class Watched:
  """A watchdog of 20 s whose clock is turned by hand."""

  def __init__(self):
    self.now = 0.0
    self.dog = watchdog.Watchdog(20.0, "unused", clock=lambda: self.now)
    self.dog.close(None)  # its thread

  def passes(self, seconds):
    """Looks once a second; returns the first alarm."""
    for _ in range(seconds):
      self.now += 1.0
      if alarm := self.dog.alarm():
        return alarm
    return None


def test_every_sign_of_progress_starts_the_limit_anew():
  watched = Watched()
  for step in range(1, 4):
    assert watched.passes(15) is None
    watched.dog.on_phase("step")
    assert watched.passes(15) is None
    watched.dog.on_step(step, {}, {})
    assert watched.passes(15) is None
    watched.dog.on_eval_batch()
  assert watched.passes(20) is None
  alarm = watched.passes(1)
  for words in ("step, step 3:", "21 s", "config.watchdog_seconds is 20"):
    assert words in alarm


def test_a_process_that_was_suspended_gets_the_limit_anew():
  watched = Watched()
  watched.passes(18)
  watched.now += 3600.0  # SIGSTOP, and SIGCONT an hour later
  assert watched.passes(20) is None
  assert watched.passes(3) is not None


HANGS = """
import sys, time
from vit_jax.callbacks import watchdog
watchdog.CHECK_SECONDS = 0.1
limit, workdir = float(sys.argv[1]), sys.argv[2]
on_exit = lambda text: print(text, flush=True)
dog = watchdog.Watchdog(limit, workdir, 3, on_exit)
dog.on_phase("evaluation")
dog.on_step(7, {}, {})
time.sleep(60)
"""


def test_a_hang_ends_with_124_and_the_stacks(tmp_path):
  workdir = tmp_path / "run"
  with several.program(HANGS, "0.5", str(workdir)) as process:
    out, err = process.communicate(timeout=60)
  assert process.returncode == 124
  stacks = (workdir / watchdog.STACKS.format(3)).read_text()
  assert "phase evaluation, step 7" in out
  assert "phase evaluation, step 7" in stacks
  for text in (err, stacks):
    assert 'File "<string>", line 10 in <module>' in text


def test_a_limit_of_0_is_none(tmp_path):
  before = threading.active_count()
  watchdog.Watchdog(0.0, str(tmp_path))
  assert threading.active_count() == before  # nobody looks

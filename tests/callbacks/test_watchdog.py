"""A phase without progress ends the process; a slow one does not."""

import pytest

from vit_jax.callbacks import watchdog
from vit_jax.callbacks.phases import NAMES, Phases
from vit_jax.callbacks.watchdog import Watchdog
from vit_jax.config import LimitsConfig
from vit_jax.distributed.hub import Member

LIMITS = LimitsConfig(
  start_seconds=50.0,
  compile_seconds=40.0,
  step_seconds=10.0,
  evaluation_seconds=20.0,
  save_seconds=30.0,
)


class Watched:
  """A watchdog whose clock is turned by hand, a second for each look."""

  def __init__(self, limits=LIMITS, others=()):
    self.now, self.alarms, self.others = 0.0, [], list(others)
    self.phases = Phases(0.0, lambda: self.now)
    self.dog = Watchdog(
      self.phases,
      limits,
      self.alarms.append,
      lambda: Member(0, "a", 1, *self.phases.now()),
      lambda: self.others,
      lambda: self.now,
    )

  def passes(self, seconds):
    """Looks once a second; returns after how many seconds it gave an alarm."""
    for _ in range(seconds):
      self.now += 1.0
      if self.dog.look():
        return self.now
    return None


@pytest.mark.parametrize("name", NAMES)
def test_each_phase_has_its_limit(name):
  watched = Watched()
  watched.phases.enter(name)
  most = int(watchdog.limit(LIMITS, name))
  assert most == {"start": 50, "compile": 40, "evaluation": 20, "save": 30}.get(
    name, 10
  )
  assert watched.passes(most) is None
  assert watched.passes(2) == most + 1
  key = "step" if name == "input" else name
  assert watched.alarms == [
    f"hung        phase {name}, step 0: no progress for {most + 1} s;"
    f" config.limits.{key}_seconds is {most}"
  ]


def test_progress_starts_the_limit_anew_and_0_is_none():
  watched = Watched()
  watched.phases.enter("step")
  for step in range(5):
    assert watched.passes(8) is None
    watched.phases.beat(step)
  endless = Watched(LimitsConfig(start_seconds=0.0))
  assert endless.passes(2000) is None


def test_a_process_that_was_stopped_itself_gets_the_limit_anew():
  watched = Watched()
  watched.phases.enter("step")
  watched.passes(8)
  watched.now += 3600.0  # SIGSTOP, and SIGCONT an hour later
  assert watched.passes(10) is None
  assert watched.passes(3) is not None


def test_who_is_within_a_limit_of_its_own_is_waited_for():
  """No alarm while another process compiles slowly; one when it is stopped."""
  other = Member(1, "b", 2, "compile", 15.0, 0, 0)
  watched = Watched(others=[other])
  watched.phases.enter("step")
  watched.phases.beat(1)
  assert watched.passes(25) is None
  other.silent = 25.0
  assert watched.passes(1) is not None
  assert (
    "process 1 (host b, pid 2) is behind: no sign of life"
    in (watched.alarms[0])
  )


def test_the_process_that_is_behind_is_named():
  others = [
    Member(1, "b", 2, "input", 11.0, 6, 6),
    Member(2, "c", 3, "step", 11.0, 7, 7),
  ]
  watched = Watched(others=others)
  watched.phases.enter("step")
  watched.phases.beat(7)
  watched.passes(11)
  assert watched.alarms[0].splitlines()[1:] == [
    "process 1 (host b, pid 2) is behind: phase input for 11 s, step 6"
  ]


def test_the_stacks_are_kept(tmp_path):
  found = watchdog.stacks()
  assert "test_the_stacks_are_kept" in found
  watchdog.keep(f"hung\n\n{found}", str(tmp_path / "run"), 3)
  assert (tmp_path / "run/stacks-3.txt").read_text().startswith("hung\n\n")

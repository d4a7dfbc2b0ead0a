"""Phases of a process add up."""

import pytest

from vit_jax.callbacks.phases import NAMES, Phases


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def test_phases_add_up_to_the_time_since_the_start():
  clock = Clock()
  phases = Phases(began=90.0, clock=clock)
  clock.now += 5
  phases.enter("step")
  clock.now += 3
  with phases("evaluation"):
    clock.now += 2
    with phases("save"):
      clock.now += 0.5
    clock.now += 1
  clock.now += 4
  assert phases.seconds() == {
    **dict.fromkeys(NAMES, 0.0),
    "start": 15.0,
    "step": 7.0,
    "evaluation": 3.0,
    "save": 0.5,
  }
  assert sum(phases.seconds().values()) == clock.now - 90.0


def test_a_phase_goes_on_with_every_beat():
  clock = Clock()
  phases = Phases(clock=clock)
  phases.enter("step")
  clock.now += 3
  assert phases.now() == ("step", 3.0, 0)
  phases.beat(7)
  clock.now += 1
  assert phases.now() == ("step", 1.0, 7)
  with phases("save"):
    assert phases.now() == ("save", 0.0, 7)
    clock.now += 9
  assert phases.now() == ("step", 0.0, 7)


def test_a_phase_ends_with_an_error_too():
  phases = Phases()
  with pytest.raises(KeyError), phases("save"):
    raise KeyError
  assert phases.now().name == "start"

"""Where the time of a run went: it adds up, whatever happened to the run."""

import json

import pytest

from vit_jax.callbacks import goodput
from vit_jax.callbacks.goodput import BUCKETS, KEY, Goodput
from vit_jax.callbacks.phases import Phases


class _Clock:
  """Seconds that pass when they are told to."""

  def __init__(self, now=1e9):
    self.now = now

  def __call__(self):
    return self.now


def _process(clock, kept=None, last=None):
  phases = Phases(clock=clock)
  return phases, Goodput(phases, kept, last, clock)


def _spend(clock, phases, **seconds):
  for name, value in seconds.items():
    with phases(name):
      clock.now += value


def _seconds(found):
  return {k: v for k, v in found.at()["seconds"].items() if v}


def _copy(account):
  """Through JSON, as a checkpoint keeps it."""
  return json.loads(json.dumps(account))


def test_one_process():
  clock = _Clock()
  phases, found = _process(clock)
  _spend(clock, phases, start=3.0, compile=4.0, input=0.5, step=10.0, save=2.5)
  assert _seconds(found) == {
    **{"start": 3.0, "compile": 4.0, "input": 0.5, "step": 10.0, "save": 2.5}
  }
  metrics = found.metrics()
  assert metrics.keys() == set(goodput.NAMES)
  assert metrics[goodput.SHARE] == 0.5
  assert goodput.of_rows([{"step": 1, **metrics}, {"step": 1}]) == {
    **dict.fromkeys(BUCKETS, 0.0),
    **_seconds(found),
  }
  assert found.text() == (
    "goodput     50 % of 20s in steps: step 10s, compile 4.0s, start 3.0s, save"
    " 2.5s, input 0.5s"
  )


def test_killed_between_checkpoint_and_sign_of_life():
  """Steps after the checkpoint are repeated; an evaluation after it is not."""
  clock = _Clock()
  phases, first = _process(clock)
  _spend(clock, phases, start=3.0, step=10.0, save=1.0)
  kept = _copy(first.at())
  _spend(clock, phases, step=4.0, input=2.0, evaluation=5.0)
  last = _copy(first.at())
  clock.now += 60.0  # killed at some time in this minute
  phases, second = _process(clock, kept, last)
  _spend(clock, phases, start=3.0, step=7.0)
  assert _seconds(second) == {
    **{"start": 6.0, "step": 17.0, "save": 1.0, "evaluation": 5.0},
    **{"repeated": 6.0, "restart": 60.0},
  }
  assert sum(_seconds(second).values()) == clock.now - 1e9


def test_killed_after_the_checkpoint_and_before_another_sign():
  clock = _Clock()
  phases, first = _process(clock)
  last = _copy(first.at())
  _spend(clock, phases, step=10.0)
  kept = _copy(first.at())
  clock.now += 7.0
  _, second = _process(clock, kept, last)
  assert _seconds(second) == {"step": 10.0, "restart": 7.0}


def test_killed_before_its_first_checkpoint_and_again():
  clock = _Clock()
  phases, found = _process(clock)
  for _ in range(3):
    _spend(clock, phases, start=2.0, step=5.0)
    last = _copy(found.at())
    clock.now += 1.0
    phases, found = _process(clock, None, last)
  assert _seconds(found) == {"start": 6.0, "repeated": 15.0, "restart": 3.0}


def test_an_older_checkpoint_and_then_the_newer_one():
  """The newest is damaged, then mended: no second is lost, or counted twice."""
  clock = _Clock()
  phases, found = _process(clock)
  _spend(clock, phases, step=10.0)
  old = _copy(found.at())
  _spend(clock, phases, step=10.0)
  new = _copy(found.at())
  phases, found = _process(clock, old, new)
  assert _seconds(found) == {"step": 10.0, "repeated": 10.0}
  _spend(clock, phases, start=1.0)
  _, found = _process(clock, new, _copy(found.at()))
  assert _seconds(found) == {"step": 10.0, "repeated": 10.0, "start": 1.0}
  assert sum(_seconds(found).values()) == clock.now - 1e9


def test_another_machine_whose_clock_is_behind():
  clock = _Clock()
  phases, found = _process(clock)
  _spend(clock, phases, step=100.0)
  kept = _copy(found.at())
  clock.now -= 30.0
  phases, found = _process(clock, kept, None)
  _spend(clock, phases, start=1.0)
  assert _seconds(found) == {"step": 100.0, "start": 1.0}


@pytest.mark.parametrize(
  "account",
  [
    *(None, [], "x", 7, {}, {"began": 1.0}, {"began": 1.0, "seconds": []}),
    {"began": 1.0, "seconds": {b: -1.0 for b in BUCKETS}},
    {"began": float("nan"), "seconds": dict.fromkeys(BUCKETS, 1.0)},
    {"began": 1.0, "seconds": dict.fromkeys(BUCKETS, "1")},
  ],
)
def test_a_damaged_account_is_none(account):
  clock = _Clock()
  _, found = _process(clock, account, account)
  assert found.at() == {"began": 1e9, "seconds": dict.fromkeys(BUCKETS, 0.0)}
  assert found.text().startswith("goodput     0 % of 0.0s in steps")


def test_an_account_of_another_run_in_the_folder_does_not_count():
  clock = _Clock()
  phases, other = _process(clock)
  _spend(clock, phases, step=100.0)
  last = _copy(other.at())
  phases, found = _process(clock)
  _spend(clock, phases, step=1.0)
  kept = _copy(found.at())
  _, found = _process(clock, kept, last)
  assert _seconds(found) == {"step": 1.0}
  assert KEY == "goodput"

"""What a trial of `make faults` is."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

Run = Callable[[pathlib.Path, int], str]


class Trial(NamedTuple):
  """A guarantee, and what tries to break it.

  guarantee: One sentence.
  run: Does the trial in an empty folder with a seed. Returns the figure as
    text; raises AssertionError where the guarantee is broken.
  seconds: About how long it takes on two cores.
  part: Number of its part, from 0, which is added to the seed.
  """

  guarantee: str
  run: Run
  seconds: float
  part: int


TRIALS: dict[str, Trial] = {}  # by name, in the order of the page


def trial(guarantee: str, seconds: float, parts: int = 1) -> Callable:
  """Makes a function a trial, such as "signals.one_process".

  In several parts, "kill.one_process.1" and so on, `make faults` goes on where
  it was stopped.
  """

  def register(run: Run) -> Run:
    name = f"{run.__module__.removeprefix('faults.')}.{run.__name__}"
    for part in range(parts):
      own = f"{name}.{part + 1}" if parts > 1 else name
      TRIALS[own] = Trial(guarantee, run, seconds, part)
    return run

  return register

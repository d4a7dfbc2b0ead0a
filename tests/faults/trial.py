"""What a trial of `make faults` is."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple


class Trial(NamedTuple):
  """A guarantee, and what tries to break it.

  name: Name of the part and of the trial, "signals.in_a_step".
  guarantee: One sentence.
  run: Does the trial in an empty folder with a seed. Returns the figure as
    text; raises AssertionError where the guarantee is broken.
  small: The test that holds a small version of it; "" if none does.
  seconds: About how long it takes on two cores.
  """

  name: str
  guarantee: str
  run: Callable[[pathlib.Path, int], str]
  small: str = ""
  seconds: float = 60.0

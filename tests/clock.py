"""A clock that sleeping alone moves."""

import time
import types
from collections.abc import Callable


class Clock:
  """Takes the place of the module `time`; see `module`.

  Attributes:
    now: Seconds.
    slept: Each sleep.
    acts: Second -> what happens then.
  """

  def __init__(self):
    self.now, self.slept = 0.0, []
    self.acts: dict[float, Callable] = {}

  def sleep(self, seconds):
    self.slept.append(seconds)
    self.now += seconds
    self.acts.get(self.now, lambda: None)()

  def module(self):
    return types.SimpleNamespace(
      monotonic=lambda: self.now, time=time.time, sleep=self.sleep
    )

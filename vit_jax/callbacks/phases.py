"""In which phase of its run a process is, and how long it spent in each."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from vit_jax.callbacks.base import Callback

# start: imports, checks, data, restore. compile: the first call of the step.
# input: the loop waits for a batch. step: all else in the loop.
NAMES = ("start", "compile", "input", "step", "evaluation", "save")


class Now(NamedTuple):
  """Where a process is.

  name: One of `NAMES`.
  seconds: Since the phase began or last went on, see `Phases.beat`.
  step: Updates given to the devices so far.
  """

  name: str
  seconds: float
  step: int


class Phases(Callback):
  """Measures phases; a process is always in exactly one, so they add up.

  The main thread enters them; any thread may ask.

  Args:
    began: Start of the run by `clock`, all since then being "start"; None: now.
    clock: Seconds, for tests.
  """

  def __init__(
    self,
    began: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._clock = clock
    self._began = clock() if began is None else began
    self._since = self._beat = self._began
    self._name, self._step = "start", 0
    self._seconds = dict.fromkeys(NAMES, 0.0)
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    """The context of a phase; afterwards the one around it goes on."""
    before = self.enter(name)
    try:
      yield
    finally:
      self.enter(before)

  def on_phase(self, name: str) -> None:
    self.enter(name)

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self.beat(step)

  def on_eval_batch(self) -> None:
    self.beat()

  def enter(self, name: str) -> str:
    """Begins a phase; returns the name of the one that ends."""
    with self._lock:
      now = self._clock()
      self._seconds[self._name] += now - self._since
      self._since = self._beat = now
      before, self._name = self._name, name
      return before

  def wall_start(self) -> float:
    """Returns the start of the run in this process, seconds since the epoch."""
    return time.time() - sum(self.seconds().values())

  def beat(self, step: int | None = None) -> None:
    """Records that the phase goes on: a step is given, a batch evaluated.

    Args:
      step: Updates given to the devices so far; None: as before.
    """
    with self._lock:
      self._beat = self._clock()
      if step is not None:
        self._step = step

  def now(self) -> Now:
    """Returns where the process is, and for how long without a beat."""
    with self._lock:
      return Now(self._name, self._clock() - self._beat, self._step)

  def seconds(self) -> dict[str, float]:
    """Returns the seconds of each of `NAMES`; their sum is the time since the
    run began."""
    with self._lock:
      seconds = dict(self._seconds)
      seconds[self._name] += self._clock() - self._since
      return seconds

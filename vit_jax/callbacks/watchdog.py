"""Ends a process that makes no progress, and says where it hangs."""

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from etils import epath

from vit_jax.callbacks.phases import Phases
from vit_jax.config import LimitsConfig
from vit_jax.distributed import peers
from vit_jax.distributed.hub import Member

TICK = 1.0  # seconds between looks
# A longer pause of the watchdog itself: the process was stopped and continued,
# and its phase gets the whole limit again.
GAP = 5.0
STACKS = "stacks-{}.txt"  # with the number of the process


def limit(limits: LimitsConfig, phase: str) -> float:
  """Returns the seconds that a phase may last without progress; 0: any."""
  name = "step" if phase == "input" else phase
  return getattr(limits, f"{name}_seconds")


class Watchdog:
  """Looks at the phases of this process from time to time.

  Waiting for another process is no fault of this one's: while one answers that
  is within the limit of its own phase, such as a first compile, no alarm is
  given. So a process that hangs alone is ended by its own watchdog, and one
  that cannot speak, stopped for instance, by those of the others.

  Args:
    phases: Of this process.
    limits: Of the config.
    on_alarm: Given the text of the alarm; ends the process.
    here: Returns this process, as the others know it.
    others: Returns the other processes; asked only when a limit is exceeded.
    clock: Seconds, for tests.
  """

  def __init__(
    self,
    phases: Phases,
    limits: LimitsConfig,
    on_alarm: Callable[[str], None],
    here: Callable[[], Member],
    others: Callable[[], Sequence[Member]] = list,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._phases, self._limits, self._on_alarm = phases, limits, on_alarm
    self._here, self._others, self._clock = here, others, clock
    self._looked = clock()
    self._is_closed = threading.Event()

  def watch(self) -> None:
    """Starts the thread that looks."""

    def run():
      while not self._is_closed.wait(TICK) and not self.look():
        pass

    threading.Thread(target=run, name="watchdog", daemon=True).start()

  def close(self) -> None:
    """Ends the thread."""
    self._is_closed.set()

  def look(self) -> bool:
    """Looks once; returns whether there was an alarm."""
    now, before = self._clock(), self._looked
    self._looked = now
    if now - before > GAP:
      self._phases.beat()
    if not self._is_late(*self._phases.now()[:2]):
      return False
    others = self._others()
    self._looked = self._clock()  # the others may have taken their time
    answering = [m for m in others if m.silent <= peers.SILENT]
    if any(not self._is_late(m.name, m.seconds) for m in answering):
      return False
    name, seconds, step = self._phases.now()
    if not self._is_late(name, seconds):
      return False  # it went on meanwhile
    key = f"config.limits.{'step' if name == 'input' else name}_seconds"
    text = (
      f"hung        phase {name}, step {step:,}: no progress for"
      f" {seconds:,.0f} s; {key} is {limit(self._limits, name):g}"
    )
    if others:
      text += "\n" + peers.behind(self._here(), others)
    self._on_alarm(text)
    return True

  def _is_late(self, name: str, seconds: float) -> bool:
    most = limit(self._limits, name)
    return 0 < most < seconds


def stacks() -> str:
  """Returns where every thread of this process is, in Python."""
  with tempfile.TemporaryFile("w+") as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read()


def keep(text: str, workdir: str, index: int) -> None:
  """Writes an alarm and the stacks to the folder of a run.

  Args:
    text: Both.
    workdir: The folder.
    index: Number of this process.
  """
  folder = epath.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / STACKS.format(index)).write_text(text + "\n")

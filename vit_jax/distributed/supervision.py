"""What surrounds a training command: signals, its other processes, its limits.

`supervised` ends the process with one of the codes of
`vit_jax.distributed.exit_codes`,
and with words that say what became of the run.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax

from vit_jax.batch import DataError
from vit_jax.callbacks import run_lock, run_record, startup, watchdog
from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.preemption import Notices, Signals, Stop
from vit_jax.callbacks.replay import DeviceFault
from vit_jax.checkpointing.checkpointer import SaveError
from vit_jax.config import ConfigError, cli
from vit_jax.distributed import exit_codes, peers, processes
from vit_jax.distributed.hub import Member
from vit_jax.writers.atomic_files import WriteError

# An error that ended another process may end this one, too, in its own words.
OWN_WORDS_SECONDS = 2.0
# Before the words of one of `TOLD`, trackers and a save are closed. Others may
# come of the process that is gone, and what they close may wait for it.
UNWIND_SECONDS = 90.0
# An error of a collective may come before the word of who has died.
WORD_SECONDS = 3.0
# Errors whose words are all that a user needs.
TOLD = (
  ConfigError,
  DataError,
  DeviceFault,
  FloatingPointError,
  SaveError,
  WriteError,
)
RESUMES = "the same command goes on from the last complete checkpoint"


@contextlib.contextmanager
def supervised(
  args: cli.Args, workdir: str, signals: Signals | None = None
) -> Iterator[Notices]:
  """Joins the processes of a run and watches over them while it lasts.

  Args:
    args: Of the command line.
    workdir: Folder of the run.
    signals: Those that this process hears since its start; None: since now.

  Yields:
    What `train_and_evaluate` asks whether to stop.
  """
  guard = _Guard(workdir)
  notices = guard.notices
  signals = signals or Signals()
  signals.notices, signals.last_acts = notices, guard.ends_by_signal
  dog = watchdog.Watchdog(
    notices.phases,
    args.config.limits,
    guard.ends_hung,
    guard.here,
    guard.others,
  )
  dog.watch()
  try:
    look = lambda: run_lock.refuse_live(workdir)
    processes.initialise(args.flags, args.faults, look=look)
    notices.wait_to_join()
    guard.joins(args.flags.get("coordinator"))
    notices.phases.beat()
    signals.install()  # jax and libtpu have handlers of their own
    notices.join(guard.how_to_agree())
    yield notices
    guard.leaves()
  except Stop as stop:
    guard.ends_stopped(stop)
  except TOLD as e:
    guard.fails(SystemExit(str(e)))
  except BaseException as e:
    guard.fails(e)
  finally:
    dog.close()
    signals.close()


class _Guard:
  """Ends the process, in each of the ways in which it can end.

  Args:
    workdir: Folder of the run.
  """

  def __init__(self, workdir: str):
    self._workdir = workdir
    self.notices = Notices(Phases(startup.BEGAN), self.ends_at_once)
    self._lifeline: peers.Lifeline | None = None
    self._index, self._count = 0, 1
    self._lost: peers.Lost | None = None
    self._is_lost = threading.Event()
    self._is_failing = False

  def joins(self, coordinator: str | None) -> None:
    """Connects to the other processes."""
    self._index, self._count = jax.process_index(), jax.process_count()
    self._lifeline, text = peers.connect(
      self.notices,
      self.ends_lost,
      self.ends_silent,
      coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
    )
    if text and self._index == 0:
      exit_codes.say(text)

  def how_to_agree(self):
    """Returns the argument of `Notices.join`."""
    if self._lifeline is not None:
      return self._lifeline.ask
    return None if self._count == 1 else self.ends_without_others

  def here(self) -> Member:
    """Returns this process, as the others know it."""
    name, seconds, step = self.notices.phases.now()
    me = self._lifeline.member if self._lifeline else Member(0, "", os.getpid())
    checks = self.notices.checks
    return Member(me.index, me.host, me.pid, name, seconds, step, checks)

  def others(self) -> Sequence[Member]:
    """Returns the other processes, as far as they are known."""
    return self._lifeline.others() if self._lifeline else []

  def leaves(self) -> None:
    """Waits for the others at the end of a finished run, or for their death."""
    if self._lifeline is not None:
      self._lifeline.leave()

  def ends_stopped(self, stop: Stop) -> None:
    """After a notice, with the state saved."""
    if self._lifeline is not None:
      self._lifeline.leave(ends=True)
    self._says(f"stopped     {str(stop).removeprefix('stopped ')}; {RESUMES}")
    exit_codes.end(exit_codes.AGAIN)

  def ends_at_once(self, reason: str) -> None:
    """After a notice, where nothing can be lost; comes back, then ends."""
    how = f"stopped by {reason} before the first step of this process"

    def end():
      if self._lifeline is not None:
        self._lifeline.leave(exit_codes.CLOSING_SECONDS, ends=True)
      self._says(f"stopped     {how[8:]}; nothing is lost; {RESUMES}, if any")
      exit_codes.end(exit_codes.AGAIN, lambda: run_record.end(how))

    threading.Thread(target=end, daemon=True).start()

  def ends_without_others(self, reason: str) -> None:
    """After a notice, where the processes cannot agree."""
    how = f"stopped by {reason}; the processes could not agree on a step"
    exit_codes.say(f"{how}, nothing is saved; {RESUMES}")
    exit_codes.end(exit_codes.AGAIN, lambda: run_record.end(how))

  def ends_by_signal(self, words: str) -> None:
    """The last acts before a second signal ends the process."""
    run_record.end(words)
    self._tells(words, exit_codes.AGAIN)

  def ends_hung(self, text: str) -> None:
    """After an alarm of the watchdog."""
    found = watchdog.stacks()
    where = f"{self._workdir}/{watchdog.STACKS.format(self._index)}"
    said = (
      f"{text}\nstacks      of all threads, also in {where}:\n{found}\n"
      f"ended       {RESUMES} (exit code {exit_codes.HUNG})"
    )
    how = " ".join(text.partition("\n")[0].split())
    exit_codes.end(
      exit_codes.HUNG,
      lambda: exit_codes.say(said),  # it waits if stderr is what hangs
      lambda: self._tells(how, exit_codes.HUNG),
      lambda: run_record.end(how),
      lambda: watchdog.keep(f"{text}\n\n{found}", self._workdir, self._index),
    )

  def ends_silent(self, text: str) -> None:
    """As `ends_hung`, from the lifeline's thread; comes back, then ends."""
    threading.Thread(target=self.ends_hung, args=[text], daemon=True).start()

  def ends_lost(self, lost: peers.Lost) -> None:
    """After the end of another process; comes back, then ends."""
    self._lost = lost
    self._is_lost.set()

    def end():
      began = time.monotonic()
      while lost.code is not None and time.monotonic() - began < (
        UNWIND_SECONDS
        if isinstance(self.notices.error, TOLD)
        else OWN_WORDS_SECONDS
      ):
        time.sleep(0.1)
      if not self._is_failing:
        # To start again is of no use where that one would fail again.
        is_error = lost.code == exit_codes.ERROR
        more = "" if is_error else f"\nended       {RESUMES}"
        exit_codes.say(f"lost        {lost}{more}")
        code = exit_codes.ERROR if is_error else exit_codes.PEER
        exit_codes.end(code, lambda: run_record.end(f"lost {lost}"))

    threading.Thread(target=end, daemon=True).start()

  def fails(self, error: BaseException) -> None:
    """After an error: raises it, or ends as one of several processes.

    jax would wait at the end for processes that are gone.
    """
    code = error.code if isinstance(error, SystemExit) else exit_codes.ERROR
    if self._lifeline is None or not code:
      raise error
    is_told = isinstance(error, SystemExit)
    how = str(error) if is_told else f"{type(error).__name__}: {error}"
    if not is_told and self._is_lost.wait(WORD_SECONDS):
      if how not in str(self._lost):  # not an error that both have met
        threading.Event().wait()  # `ends_lost` ends the process
    self._is_failing = True
    if is_told:
      exit_codes.say(how)
    else:
      sys.excepthook(type(error), error, error.__traceback__)
    code = code if isinstance(code, int) else exit_codes.ERROR
    # A collective also fails where another process died without a word yet.
    is_device = isinstance(error, jax.errors.JaxRuntimeError)
    told = exit_codes.PEER if is_device else code
    exit_codes.end(code, lambda: self._tells(how, told))

  def _tells(self, how: str, code: int) -> None:
    if self._lifeline is not None:
      self._lifeline.ends(how, code)

  def _says(self, text: str) -> None:
    """Prints what is the same in all processes."""
    if self._index == 0:
      exit_codes.say(f"{text} (exit code {exit_codes.AGAIN})")

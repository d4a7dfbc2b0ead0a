"""Time from the command to the first step, and the compilation cache.

Compiled programs are cached on disk. A run that resumes, or starts again with
the same shapes, need not compile them.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import note as print_note

if TYPE_CHECKING:
  from vit_jax.step import TrainState

BEGAN = time.time()  # The commands import this before jax.
CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"  # and written


def use_cache(workdir: str | None = None) -> None:
  """Caches compiled programs in $XDG_CACHE_HOME/vit_jax/xla, or ~/.cache.

  A run of several processes, which must have joined before, caches them in
  <workdir>/xla, which may be in a bucket: jax lets only process 0 write, and
  the others must see its files.

  Programs that take more than a second to compile are cached (jax's default).
  The name of a file is a hash of program, versions, devices and flags, so a
  wrong file is never used, and any file may be deleted.
  JAX_COMPILATION_CACHE_DIR sets another folder;
  JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.

  Args:
    workdir: Folder of the run, or None.
  """
  import jax  # only here, as BEGAN comes before

  from vit_jax.paths import cache_folder, is_remote

  folder = jax.config.jax_compilation_cache_dir
  if folder is None and workdir is not None and jax.process_count() > 1:
    folder = f"{workdir}/xla"  # jax makes it
  elif folder is None:
    folder = cache_folder("xla")
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError:
      return  # a home without write access: nothing is cached
  if is_remote(folder):
    # XLA's own cache of tuned GPU programs needs local files, and would fail at
    # the first compilation.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
  jax.config.update("jax_compilation_cache_dir", str(folder))


class Startup(Callback):
  """Prints the seconds from the start of a run to the end of its first step.

  The line has the seconds of each part, and whether all programs that are
  cached came from the cache.

  Args:
    began: Start of the command, seconds since the epoch. The time until now is
      the part "imports". None for now.
    note: Prints the line.

  Attributes:
    began: The argument, or the time of the construction.
  """

  def __init__(
    self,
    began: float | None = None,
    note: Callable[[str], None] = print_note,
  ):
    from jax import monitoring

    self._note = note
    self.began = self._last = time.time() if began is None else began
    self._parts: dict[str, float] = {}
    self._events = {CACHE_HIT: 0, CACHE_MISS: 0}
    self._close = lambda: monitoring.unregister_event_listener(self._count)
    monitoring.register_event_listener(self._count)
    if began is not None:
      self.ends("imports")

  def ends(self, part: str) -> None:
    """Ends a part, unless it has ended before; the next begins."""
    if part not in self._parts:
      now = time.time()
      self._parts[part] = now - self._last
      self._last = now

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    self.ends("model and state")

  def on_phase(self, name: str) -> None:
    if name == "input":
      self.ends("evaluators")
    elif name == "compile":
      self.ends("first batch")

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    if "first step" not in self._parts:  # `values`: the step is computed
      is_hit = self._events[CACHE_HIT] > 0 == self._events[CACHE_MISS]
      self.ends("first step")
      parts = ", ".join(f"{k} {v:.1f}" for k, v in self._parts.items())
      self._note(
        f"start       {self._last - self.began:.1f} s to the end of the first"
        f" step: {parts} ({_cache(is_hit)})"
      )
    return values

  def close(self, error: BaseException | None) -> None:
    self._close()

  def _count(self, event: str, **_) -> None:
    if event in self._events:
      self._events[event] += 1


def _cache(is_hit: bool) -> str:
  import jax

  folder = jax.config.jax_compilation_cache_dir
  if folder is None or not jax.config.jax_enable_compilation_cache:
    return "no cache"
  return f"cache {'hit' if is_hit else 'miss'}, {folder}"

"""From the command to the first step: where the time goes, and the cache.

Compiled programs are kept on disk, so that a run that resumes, or starts again
with the same shapes, need not recompile them.
"""

import atexit
import gc
import os
import pathlib
import time
from collections.abc import Callable

BEGAN = time.perf_counter()  # The commands import this before jax.
HITS = "/jax/compilation_cache/cache_hits"

# Else Python looks through all objects for garbage when it ends, for a second.
atexit.register(gc.freeze)


def use_cache(workdir: str | None = None) -> None:
  """Keeps compiled programs in $XDG_CACHE_HOME/vit_jax/xla, or ~/.cache.

  A run of several processes, which must have met before this is called, keeps
  them in <workdir>/xla, on a bucket if that is one: jax lets process 0 alone
  write, and the others can read only what they see.

  Only those that take more than a second to compile (jax's default). The name
  of a file is a hash of program, versions, devices and flags, so a wrong one is
  never used, and any may be deleted. JAX_COMPILATION_CACHE_DIR names another
  folder; JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
  """
  import jax  # only here, as BEGAN comes before

  folder = jax.config.jax_compilation_cache_dir
  if folder is None and workdir is not None and jax.process_count() > 1:
    folder = f"{workdir}/xla"  # jax makes it
  elif folder is None:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "vit_jax" / "xla"
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError:
      return  # a home without write access; compiling works all the same
  if "://" in str(folder):
    # XLA's own cache of how it tunes GPU programs knows local files only, and
    # would end the first compilation.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
  jax.config.update("jax_compilation_cache_dir", str(folder))


class Start:
  """Measures the seconds of each phase from the start to the first step.

  Args:
    since: Start of the command, by time.perf_counter(), all imports until now
      being the first phase; None: now.
    beat: Called at the end of each phase.
  """

  def __init__(
    self,
    since: float | None = None,
    beat: Callable[[], None] = lambda: None,
  ):
    from jax import monitoring

    self._beat = beat
    self._began = self._last = time.perf_counter() if since is None else since
    self._phases: dict[str, float] = {}
    self._hits = self._hits_before = 0
    self._unregister = lambda: monitoring.unregister_event_listener(self._count)
    monitoring.register_event_listener(self._count)
    if since is not None:
      self.ends("imports")

  def ends(self, phase: str) -> None:
    """Ends a phase; the next begins."""
    now = time.perf_counter()
    self._phases[phase] = now - self._last
    self._last = now
    self._beat()
    self._hits_before = self._hits

  def text(self, phase: str) -> str | None:
    """Ends the last phase, in which the step was compiled or read.

    Returns:
      One line: the total, each phase, and whether the cache had the step; None
        on later calls.
    """
    import jax

    if phase in self._phases:
      return None
    is_hit = self._hits > self._hits_before
    self.ends(phase)
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache:
      cache = "no cache"
    else:
      cache = f"cache {'hit' if is_hit else 'miss'}, {folder}"
    phases = ", ".join(f"{k} {v:.1f}" for k, v in self._phases.items())
    return (
      f"start       {self._last - self._began:.1f} s to the end of the first"
      f" step: {phases} ({cache})"
    )

  def __enter__(self):
    return self

  def __exit__(self, *exception) -> None:
    self._unregister()

  def _count(self, event: str, **_) -> None:
    self._hits += event == HITS

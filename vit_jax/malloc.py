"""Memory of the machine that runs Python, where it computes as well."""

import ctypes
import platform

import jax

# From glibc's malloc.h: M_MMAP_MAX 0, so that no block has a mapping of its
# own; M_TRIM_THRESHOLD -1, so that the end of the heap is never given back.
SETTINGS = ((-4, 0), (-1, -1))


def keep() -> bool:
  """Keeps the memory of a step for the next one, if a CPU computes.

  XLA allocates a step's temporaries from the C library and frees them after
  every step. Linux hands them out as new pages, which it clears one by one: a
  third of a step of ViT-Ti/16 on one core. Here glibc keeps the memory, so the
  process holds the most it ever used. It can do so for the main thread only,
  which therefore runs the steps itself instead of passing them to another
  thread; reading data stays in threads of its own. Other C libraries are left
  alone.

  Call it before the first computation, and after jax.distributed.initialize.

  Returns:
    Whether it was done.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  # Read when jax looks for its devices; GPUs and TPUs ignore it.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if jax.default_backend() != "cpu":
    return False
  libc = ctypes.CDLL(None)
  return all([libc.mallopt(*setting) for setting in SETTINGS])

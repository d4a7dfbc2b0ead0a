"""Memory of the machine that runs Python, where that computes as well."""

import ctypes
import platform

import jax

# Of glibc's malloc.h: M_MMAP_MAX 0, so that no block has a mapping of its own;
# M_TRIM_THRESHOLD -1, so that the end of the heap is never given back.
SETTINGS = ((-4, 0), (-1, -1))


def keep() -> bool:
  """Keeps the memory of a step for the next one, if a CPU computes.

  XLA takes a step's temporaries from the C library each time, and gives them
  back. Linux hands them out as new pages, which it clears one by one: a third
  of a step of ViT-Ti/16 on one core. Here glibc keeps what it has, so the
  process holds the most it ever used. It can do so for the main thread alone,
  which therefore runs the steps itself instead of handing them to another;
  reading data goes on in threads of its own. Other C libraries are left alone.

  Call it before the first computation, and after jax.distributed.initialize.

  Returns:
    Whether it was done.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  # Read when jax looks for its devices; GPUs and TPUs do not know it.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if jax.default_backend() != "cpu":
    return False
  libc = ctypes.CDLL(None)
  return all([libc.mallopt(*setting) for setting in SETTINGS])

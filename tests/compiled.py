"""The programs that jax compiles."""

import logging
import re

import jax

LOGGER = logging.getLogger("jax._src.interpreters.pxla")


class Compiled(logging.Handler):
  """In its body, notes the names of compiled programs, of all threads."""

  def __init__(self):
    super().__init__()
    self.names = []

  def emit(self, record):
    if match := re.match(r"Compiling jit\((.+?)\) with", record.getMessage()):
      self.names.append(match[1])

  def __enter__(self):
    LOGGER.addHandler(self)
    jax.config.update("jax_log_compiles", True)
    return self

  def __exit__(self, *_):
    jax.config.update("jax_log_compiles", False)
    LOGGER.removeHandler(self)

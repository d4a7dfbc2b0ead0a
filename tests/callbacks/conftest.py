"""One run of two steps, which the tests of callbacks share."""

import logging
import re
from typing import NamedTuple

import jax
import pytest
import tiny

from vit_jax import sharding
from vit_jax.callbacks import Callback
from vit_jax.train import train_and_evaluate


class Seen(NamedTuple):
  """What a run did: (step, accuracy) at each evaluation; compiled programs."""

  scores: list[tuple[int, float]]
  compiled: list[str]


class _Scores(Callback):
  def __init__(self):
    self.seen = []

  def on_scores(self, step, scores):
    self.seen.append((step, scores["digits/top1"]))


LOGGER = logging.getLogger("jax._src.interpreters.pxla")


class Compiled(logging.Handler):
  """Notes the names of the programs that jax compiles, in all threads."""

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


@pytest.fixture(scope="session")
def seen(tmp_path_factory) -> Seen:
  """A run of two steps on one device, evaluated at 0, 1 and 2."""
  score = dict(kind="classification", dataset="digits", split="test[:64]")
  score |= dict(ops="decode|resize(16)", every_steps=1, at_start=True)
  config = tiny.config(
    total_steps=2, model__depth=1, optim__warmup_steps=0, evals__digits=score
  )
  folder, scores = str(tmp_path_factory.mktemp("run")), _Scores()
  make_mesh = sharding.make_mesh
  one = lambda mesh: make_mesh(mesh, jax.devices()[:1])
  with pytest.MonkeyPatch.context() as patch, Compiled() as compiled:
    patch.setattr(sharding, "make_mesh", one)
    train_and_evaluate(config, folder, tiny.Data(), callbacks=[scores])
  return Seen(scores.seen, compiled.names)

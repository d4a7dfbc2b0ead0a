"""Callbacks by import path, as in config.callbacks."""

import pytest

from vit_jax.callbacks import Callback
from vit_jax.callbacks.named import from_names
from vit_jax.config import defaults, freeze


class Mean(Callback):
  def __init__(self, decay=0.5, axes=()):
    if decay > 1:
      raise ValueError("decay is above 1")
    self.decay, self.axes = decay, axes


HERE = f"{__name__}:Mean"


def test_arguments_from_the_command_line():
  texts = freeze(
    {"callbacks": f"{HERE}(decay=0.9, axes=(0, 1)),{HERE},{HERE}()"}
  ).callbacks
  assert len(texts) == 3
  errors = []
  made = from_names(texts, errors)
  assert [(m.decay, m.axes) for m in made] == [(0.9, (0, 1))] + [(0.5, ())] * 2
  assert not errors


def test_in_a_config_file():
  c = defaults()
  c.callbacks = (HERE, f"{HERE}(axes=(0, 1))")
  assert freeze(c).callbacks == (HERE, f"{HERE}(axes=(0, 1))")


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("Mean", "package.module:Class"),
    (f"{__name__}:freeze", "vit_jax.callbacks.base.Callback"),
    (f"{HERE}(0.9)", "as Python writes them"),
    (f"{HERE}(decay=open('a'))", "as Python writes them"),
    (f"{HERE}(decay=1) + (1)", "as Python writes them"),
    (f"{HERE}(decay=1)(axes=2)", "as Python writes them"),
    (f"{HERE}(dekay=1)", "unexpected keyword argument 'dekay'"),
    (f"{HERE}(decay=2)", "ValueError: decay is above 1"),
  ],
)
def test_errors(text, words):
  errors = []
  assert not from_names([text], errors)
  assert len(errors) == 1 and words in errors[0]
  assert errors[0].startswith("config.callbacks: ")

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


def test_arguments_of_the_command_line_and_of_a_file():
  text = f"{HERE}(decay=0.9, axes=(0, 1)),{HERE},{HERE}()"
  texts = freeze({"callbacks": text}).callbacks
  errors = []
  made = from_names(texts, errors)
  assert [(m.decay, m.axes) for m in made] == [(0.9, (0, 1))] + [(0.5, ())] * 2
  assert not errors
  c = defaults()
  c.callbacks = (HERE, f"{HERE}(axes=(0, 1))")
  assert freeze(c).callbacks == (HERE, f"{HERE}(axes=(0, 1))")


# What is wrong, and a key word of its error.
WRONG = {
  "Mean": "package.module:Class",
  f"{__name__}:freeze": "callbacks.base.Callback",
  f"{HERE}(0.9)": "Python",
  f"{HERE}(decay=open('a'))": "Python",
  f"{HERE}(decay=1) + (1)": "Python",
  f"{HERE}(decay=1)(axes=2)": "Python",
  f"{HERE}(dekay=1)": "dekay",
  f"{HERE}(decay=2)": "decay is above 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text):
  errors = []
  assert not from_names([text], errors)
  (error,) = errors
  assert error.startswith("config.callbacks: ") and WRONG[text] in error

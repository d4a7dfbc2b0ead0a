"""Callbacks: order, phases, saved state, closing; and by import path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.callbacks import Callback, CallbackList
from vit_jax.callbacks.named import from_names
from vit_jax.config import defaults, freeze


class Recorder(Callback):
  def __init__(self, calls, name=""):
    self.calls, self.name = calls, name

  def on_phase(self, name):
    self.calls.append((self.name, name))

  def on_log(self, step, values):
    return values | {self.name: step}

  def state_dict(self, step):
    return {"step": step}

  def close(self, error):
    self.calls.append((self.name, "close", type(error)))
    if self.name == "b":
      raise OSError("cannot be closed")


def test_values_states_and_phases_of_several():
  first, last = Recorder([], "a"), Recorder([], "b")
  callbacks = CallbackList([first, Callback(), last])
  assert callbacks.on_log(3, {"loss": 1.0}) == {"loss": 1.0, "a": 3, "b": 3}
  assert callbacks.state_dict(3) == {"a": {"step": 3}, "b": {"step": 3}}
  with callbacks.phase("evaluation"):
    with callbacks.phase("input"):
      pass
  names = ["evaluation", "input", "evaluation", "start"]
  assert [name for _, name in last.calls] == names
  with pytest.raises(ValueError, match="name a"):
    CallbackList([first, first])


def test_a_callback_may_compute_with_metrics():
  """The loop's guard refuses that; on a GPU it also refuses to print them."""
  seen = []

  class Half(Callback):
    def on_step(self, step, batch, metrics):
      seen.append(float(metrics["loss"] * np.float32(0.5)))

  metrics = {"loss": jnp.float32(3)}
  with jax.transfer_guard("disallow"):
    CallbackList([Half()]).on_step(1, {}, metrics)
  assert seen == [1.5]


def test_all_are_closed_the_last_one_first():
  calls = []
  recorders = [Recorder(calls, name) for name in "abc"]
  with pytest.raises(OSError):
    with CallbackList(recorders):
      raise KeyError
  assert calls == [(name, "close", KeyError) for name in "cba"]


class Mean(Callback):
  def __init__(self, decay=0.5, axes=()):
    if decay > 1:
      raise ValueError("decay is above 1")
    self.decay, self.axes = decay, axes


HERE = f"{__name__}:Mean"


def test_import_paths_of_the_command_line_and_of_a_file():
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
  f"{HERE}(decay=open('a'))": "Python",
  f"{HERE}(decay=1) + (1)": "Python",
  f"{HERE}(dekay=1)": "dekay",
  f"{HERE}(decay=2)": "decay is above 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_errors_of_import_paths(text):
  errors = []
  assert not from_names([text], errors)
  (error,) = errors
  assert error.startswith("config.callbacks: ") and WRONG[text] in error

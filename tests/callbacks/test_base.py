"""The interface of callbacks: order, phases, saved state, closing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.callbacks import Callback, CallbackList


class _Recorder(Callback):
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


def test_values_and_states_of_several():
  callbacks = CallbackList([_Recorder([], "a"), Callback(), _Recorder([], "b")])
  assert callbacks.on_log(3, {"loss": 1.0}) == {"loss": 1.0, "a": 3, "b": 3}
  assert callbacks.state_dict(3) == {"a": {"step": 3}, "b": {"step": 3}}


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


def test_phases_nest():
  calls = []
  callbacks = CallbackList([_Recorder(calls)])
  with callbacks.phase("evaluation"):
    with callbacks.phase("input"):
      pass
  names = ["evaluation", "input", "evaluation", "start"]
  assert [name for _, name in calls] == names


def test_all_are_closed_the_last_one_first():
  calls = []
  recorders = [_Recorder(calls, name) for name in "abc"]
  with pytest.raises(OSError):
    with CallbackList(recorders):
      raise KeyError
  assert calls == [(name, "close", KeyError) for name in "cba"]


def test_two_of_one_name_are_refused():
  with pytest.raises(ValueError, match="name a"):
    CallbackList([_Recorder([], "a"), _Recorder([], "a")])

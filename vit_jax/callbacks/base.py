"""The interface of callbacks.

A `Callback` is a file in this folder, or a class of your own:

    class Every1000(Callback):
      def on_step(self, step, batch, metrics):
        if step % 1000 == 0:
          ...

    train_and_evaluate(config, workdir, callbacks=[Every1000()])

`train.py` shows where each method is called. This module imports no jax, so
that commands that only read runs start fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.options import ConfigError, unexpected

if TYPE_CHECKING:
  import jax

  from vit_jax.step import Params, TrainState


class Stop(BaseException):
  """Stops a run after the current step, in all its processes; not an error.

  The train loop saves the state and raises it again.

  Attributes:
    reason: Why the run stops, such as "SIGTERM".
    step: Updates in the saved state; None if nothing was saved.
  """

  def __init__(self, reason: str):
    super().__init__(reason)
    self.reason = reason
    self.step: int | None = None

  def __str__(self) -> str:
    if self.step is None:
      return f"stopped by {self.reason}"
    return f"stopped by {self.reason} at step {self.step:,}, which is saved"


class Callback:
  """Observes a run; every method is optional and does nothing by default.

  Every process of a run calls the same methods in the same order. So a method
  may use collectives, if it does so in each process.

  Attributes:
    name: Key of `state_dict` in the metadata of checkpoints, and of the memory
      in the state; "" for a callback with neither.
  """

  name = ""

  def init_memory(self, params: Params) -> Any:
    """Returns the arrays that `step_metrics` gets at the first step.

    They are a part of the state: split over the devices like the parameters
    whose paths they have, saved with it, and the same after a resume. If the
    run resumes from a checkpoint without this callback, they start anew.

    Args:
      params: The trained parameters; see `step_metrics`.

    Returns:
      A nested dict of arrays, or an array; None for none.
    """
    return None

  def step_metrics(
    self,
    step: jax.Array,
    grads: Params,
    updates: Params,
    params: Params,
    memory: Any,
  ) -> tuple[dict[str, jax.Array], Any]:
    """Returns further metrics of a step, computed on the devices.

    This is a pure function, and becomes a part of the jitted train step. Its
    metrics are among the `metrics` of `on_step` and the `values` of `on_log`. A
    metric that is NaN or infinite is written, and does not end the run.

    The trees have the trained parameters only (the others are None), and
    separate blocks, also under config.model.scan.

    Args:
      step: Updates applied before this one, int32.
      grads: Gradients of the mean loss, before clipping.
      updates: What the optimizer adds to the parameters.
      params: Parameters before the update.
      memory: What `init_memory` or the step before has returned. After a
        skipped step it is as before that step.

    Returns:
      Scalars by name, such as {"update_norm/head": ...}; the new memory.
    """
    return {}, memory

  def initial_state(self, state: TrainState) -> TrainState:
    """Returns the state with which a new run begins; it may change it.

    Called when the weights of config.init are loaded, not after a resume.
    """
    return state

  def final_state(self, step: int, state: TrainState) -> TrainState:
    """Returns the state that is saved after the last step; it may change it."""
    return state

  def on_start(self, start: int, state: TrainState, saved: Mapping) -> None:
    """Called after the state is made, before the first batch is read.

    Args:
      start: Updates already applied; 0 for a new run.
      state: State before the first step.
      saved: Metadata of the checkpoint that the run resumes from, with each
        callback's `state_dict` under its `name`; {} for a new run.
    """

  def on_phase(self, name: str) -> None:
    """Called when the loop enters a phase.

    Args:
      name: One of "start", "input" (waits for a batch), "compile" (the first
        step), "step", "evaluation" and "save". At the end of an inner phase,
        the outer phase is entered again.
    """

  def on_step(
    self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping
  ) -> None:
    """Called after every step, when the devices may still compute it.

    It should not wait for the newest step; reading a value of `metrics` waits.

    Args:
      step: Number of steps started so far, from 1.
      batch: Global arrays of the step: image (or the views of the objective),
        label, mask, index. If the frozen part of the model is computed once,
        "image" has its activations, floats (see `vit_jax.finetune.frozen`).
      metrics: Scalars of the step on the devices, such as loss.
    """

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    """Returns the values to write for a step; it may add some.

    Called every `log_steps`, at the first step, and before each save, also one
    that is tried again.

    Args:
      step: Updates applied so far.
      values: Metrics of the step as floats, and those that the callbacks before
        this one added. They are written under the names `train/<key>`.

    Raises:
      Exception: Ends the run; the state is not saved.
    """
    return values

  def on_scores(self, step: int, scores: dict[str, float]) -> None:
    """Called when an evaluator's scores are known, only in process 0.

    Args:
      step: Updates in the parameters that were scored, perhaps not the newest.
      scores: Metrics by their names, such as "test/top1".
    """

  def on_eval_batch(self) -> None:
    """Called before each batch of an evaluation; may raise `Stop`."""

  def before_save(self, step: int) -> None:
    """Called before a checkpoint is written; an exception prevents it."""

  def state_dict(self, step: int) -> dict:
    """Returns the state to save with the checkpoint of a step, for JSON."""
    return {}

  def check_stop(self, step: int) -> None:
    """Raises `Stop` if the run should stop after this step.

    Called last in each step. All processes must raise it at the same step.
    """

  def stop_requested(self) -> bool:
    """Whether this process is about to stop, and should not wait for scores."""
    return False

  def on_end(self, state: TrainState) -> None:
    """Called once after the last step, when its checkpoint is written."""

  def close(self, error: BaseException | None) -> None:
    """Releases the callback's resources, however the run ends.

    Args:
      error: What ended the run, possibly a `Stop`; None if it is finished.
    """


class CallbackList:
  """Calls the methods of several callbacks in their order.

  A context manager: at its end the callbacks are closed, the last one first.

  Args:
    callbacks: Callbacks of a run; no two may have the same `name`.
  """

  def __init__(self, callbacks: Iterable[Callback] = ()):
    self._callbacks: tuple[Callback, ...] = ()
    self._phase = "start"
    self.put_first(callbacks)

  def put_first(self, callbacks: Iterable[Callback]) -> None:
    """Adds callbacks that are called before those that are already there."""
    self._callbacks = (*callbacks, *self._callbacks)
    names = [c.name for c in self._callbacks if c.name]
    if twice := sorted({n for n in names if names.count(n) > 1}):
      got = f"several with the name {', '.join(twice)}"
      raise ConfigError([unexpected("config.callbacks", got, "other names")])

  @property
  def observers(self) -> list[Callback]:
    """The callbacks that are a part of the jitted step."""
    return [
      c
      for c in self._callbacks
      if type(c).step_metrics is not Callback.step_metrics
    ]

  def __enter__(self) -> CallbackList:
    return self

  def __exit__(self, kind, error: BaseException | None, trace) -> None:
    with contextlib.ExitStack() as stack:
      for callback in self._callbacks:
        stack.callback(callback.close, error)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """The context of a phase; at its end the outer phase is entered again."""
    before = self._phase
    self.enter(name)
    try:
      yield
    finally:
      self.enter(before)

  def enter(self, name: str) -> None:
    """Enters a phase, which lasts until the next one is entered."""
    self._phase = name
    for callback in self._callbacks:
      callback.on_phase(name)

  def initial_state(self, state: TrainState) -> TrainState:
    for callback in self._callbacks:
      state = callback.initial_state(state)
    return state

  def final_state(self, step: int, state: TrainState) -> TrainState:
    import jax

    with self.phase("evaluation"), jax.transfer_guard("allow"):
      for callback in self._callbacks:
        state = callback.final_state(step, state)
    return state

  def on_start(self, start: int, state: TrainState, saved: Mapping) -> None:
    for callback in self._callbacks:
      callback.on_start(start, state, saved)

  def on_step(
    self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping
  ) -> None:
    import jax

    # The loop refuses implicit transfers. A callback may print a metric.
    with jax.transfer_guard("allow"):
      for callback in self._callbacks:
        callback.on_step(step, batch, metrics)

  def on_log(self, step: int, metrics: Mapping) -> dict[str, float]:
    values = {key: float(value) for key, value in metrics.items()}
    for callback in self._callbacks:
      values = callback.on_log(step, values)
    return values

  def on_scores(self, step: int, scores: dict[str, float]) -> None:
    for callback in self._callbacks:
      callback.on_scores(step, scores)

  def on_eval_batch(self) -> None:
    for callback in self._callbacks:
      callback.on_eval_batch()

  def before_save(self, step: int) -> None:
    for callback in self._callbacks:
      callback.before_save(step)

  def state_dict(self, step: int) -> dict[str, dict]:
    """Returns the state of every callback that has a name."""
    return {c.name: c.state_dict(step) for c in self._callbacks if c.name}

  def check_stop(self, step: int) -> None:
    for callback in self._callbacks:
      callback.check_stop(step)

  def stop_requested(self) -> bool:
    return any(callback.stop_requested() for callback in self._callbacks)

  def on_end(self, state: TrainState) -> None:
    for callback in self._callbacks:
      callback.on_end(state)

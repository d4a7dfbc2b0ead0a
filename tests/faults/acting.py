"""Trains as `vit-jax train` does, and does something to itself at a place.

Run: python -m faults.acting PLACE ACT WORDS...

PLACE: start, restore, compile, input, step, evaluation, scoring, save.
ACT: a signal (SIGTERM, SIGSTOP, SIGKILL), fail (raises an error), or hang
(waits for ever).

PLACE batches: labels are a number per class, and ACT spoils those of steps:
nan:3,5 (one label is none), or nothing.
"""

import os
import runpy
import signal
import sys
import threading

PLACE, ACT = sys.argv[1:3]
AFTER = {"compile": 1, "input": 4, "step": 4, "save": 2}  # times of the phase
counts: dict[str, int] = {}


def act() -> None:
  """Acts, the first time."""
  if counts.setdefault("acts", 0):
    return
  counts["acts"] = 1
  print(f"acts        {ACT} in {PLACE}", file=sys.stderr, flush=True)
  if ACT == "fail":
    raise RuntimeError("an error on purpose")
  if ACT == "hang":
    threading.Event().wait()
  else:
    os.kill(os.getpid(), getattr(signal, ACT))


def before(owner, name: str) -> None:
  """Lets a function act before it does what it does."""
  function = getattr(owner, name)

  def acting(*args, **kwargs):
    act()
    return function(*args, **kwargs)

  setattr(owner, name, acting)


def spoil(batch: dict, step: int) -> dict:
  """Returns the batch of a step, spoiled where `ACT` says so."""
  import numpy as np

  batch["label"] = np.eye(10, dtype=np.float32)[batch["label"]]
  if str(step) in ACT.removeprefix("nan:").split(","):
    batch["label"][3] = np.nan
  return batch


def main() -> None:
  from vit_jax import batch, eval_context, run_checks
  from vit_jax.callbacks import base
  from vit_jax.checkpointing import checkpointer
  from vit_jax.evaluators import fewshot

  if PLACE == "batches":
    checked = batch.checked

    def spoiled(*args, start_step, **kwargs):
      batches = checked(*args, start_step=start_step, **kwargs)
      for step, values in enumerate(batches, start_step + 1):
        yield spoil(values, step)

    batch.checked = spoiled
  elif PLACE == "start":
    before(run_checks, "setup")
  elif PLACE == "restore":
    before(checkpointer.Checkpointer, "restore_newest")
  elif PLACE == "evaluation":
    before(eval_context.RunContext, "forward")
  elif PLACE == "scoring":
    before(fewshot.Fewshot, "score")
  else:
    enter = base.CallbackList.enter

    def entering(self, name):
      enter(self, name)
      counts[name] = counts.get(name, 0) + 1
      if name == PLACE and counts[name] >= AFTER[name]:
        act()

    base.CallbackList.enter = entering
  # What a script starts in the background ignores Ctrl-C, and hands that down.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  sys.argv[1:] = sys.argv[3:]
  runpy.run_module("vit_jax.train", run_name="__main__")


if __name__ == "__main__":
  main()

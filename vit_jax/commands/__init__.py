"""The commands, `vit-jax VERB`: a new one is a module and a line here.

A module parses the words after its verb, which takes nothing heavy, and then
imports and calls the room that does the work.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.commands import (
  benchmark,
  cache,
  convert,
  diff,
  evaluate,
  models,
  plan,
  predict,
  prepare,
  report,
  score,
  serve,
  sweep,
  train,
  verify,
  visualize,
)


class Command(NamedTuple):
  """A command.

  main: Runs it, given the words after the verb; returns the exit status, None
    for 0, or ends the process.
  about: What it does, in a line.
  """

  main: Callable[[Sequence[str]], int | None]
  about: str


COMMANDS = {
  "train": Command(train.main, "pre-train or fine-tune, as a config file says"),
  "evaluate": Command(
    evaluate.main, "score a checkpoint, or its features on your own images"
  ),
  "predict": Command(
    predict.main, "print the classes of images, or write their features"
  ),
  "visualize": Command(
    visualize.main, "draw what a model learned, and where it looks"
  ),
  "score": Command(
    score.main, "score published weights beside their published figures"
  ),
  "sweep": Command(
    sweep.main, "try learning rates, train with the best, test it once"
  ),
  "serve": Command(serve.main, "open a page to try a model on dropped images"),
  "report": Command(report.main, "write a page on one run or several"),
  "diff": Command(
    diff.main, "find where two runs diverge, and what differs between them"
  ),
  "convert": Command(convert.main, "write weights in another format"),
  "models": Command(
    models.main, "list every model with its size and published files"
  ),
  "plan": Command(
    plan.main, "estimate memory, time and cost on a slice of TPUs"
  ),
  "benchmark": Command(
    benchmark.main, "measure the speed of the train step on this machine"
  ),
  "prepare": Command(prepare.main, "write a data set to disk"),
  "cache": Command(cache.main, "list the caches on this disk, or remove one"),
  "verify": Command(
    verify.main, "check that a run's checkpoints are as they were written"
  ),
}

"""The commands, `vit-jax VERB`. A new command is a module and a line here.

The module parses the arguments after the verb with light imports only. Then it
imports and calls the package that does the work.
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

  main: Runs the command on the arguments after the verb. Returns the exit
    status (None: 0), or ends the process.
  about: What the command does, in one line.
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
    score.main, "score weights, and compare them with published scores"
  ),
  "sweep": Command(
    sweep.main, "search learning rates, train with the best, test once"
  ),
  "serve": Command(serve.main, "open a page to try a model on dropped images"),
  "report": Command(report.main, "write a page on one run or several"),
  "diff": Command(diff.main, "find the first difference between two runs"),
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

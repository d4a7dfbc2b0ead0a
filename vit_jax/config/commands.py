"""The commands, `vit-jax VERB`; a new one is a module and a line here."""

import argparse
import sys
from typing import NoReturn

from vit_jax.options import at_home, nearest

# Modules of what only the extra `train` installs.
NOT_LEAN = (
  "sklearn",
  "tensorboard",
  "tensorflow",
  "tensorflow_datasets",
  "threadpoolctl",
)

# Verb -> what it does. Each is a module of vit_jax/commands; train and
# benchmark are modules of vit_jax itself.
COMMANDS = {
  "train": "pre-train or fine-tune, as a config file says",
  "evaluate": "score a checkpoint; few-shot on your own images",
  "predict": "name the classes of images, folders of images, a list",
  "visualize": "draw what a model learned, and where it looks",
  "score": "score published weights beside their published figures",
  "sweep": "try learning rates, train with the best, score the test once",
  "serve": "open a page to try a model on dropped images",
  "report": "write a page on one run or several",
  "diff": "tell where two runs part, and what differs between them",
  "convert": "write weights in another format",
  "models": "list every model with its size and published files",
  "plan": "estimate memory, time and cost on a slice of TPUs",
  "benchmark": "measure the speed of the train step here",
  "prepare": "put a data set on disk",
  "verify": "check that a run's checkpoints are as they were written",
}


class _Parser(argparse.ArgumentParser):
  """Takes files before and behind flags.

  It finds the home folder in --flag=~/x, and names the known flag that is
  nearest to an unknown one, as `train` does.
  """

  def parse_args(self, args=None, namespace=None):
    words = sys.argv[1:] if args is None else list(args)
    if "--" in words:  # Python 3.11 forgets it where files may follow flags
      return super().parse_args(words, namespace)
    return self.parse_intermixed_args(words, namespace)

  def parse_known_args(self, args=None, namespace=None):
    words = sys.argv[1:] if args is None else list(args)
    return super().parse_known_args(at_home(words), namespace)

  def error(self, message: str) -> NoReturn:
    known = [name for a in self._actions for name in a.option_strings]
    _, _, unknown = message.partition("unrecognized arguments: ")
    words = [w.split("=")[0] for w in unknown.split() if w.startswith("--")]
    super().error(message + "".join(nearest(w, known) for w in words))


def parser(
  verb: str, description: str, example: str, usage: str | None = None
) -> argparse.ArgumentParser:
  """Returns a parser whose --help ends with an example.

  Args:
    verb: Name of the command.
    description: What it does; lines are kept as they are.
    example: Command lines as a user types them, each a line.
    usage: What follows the verb in the first line; None: every option.
  """
  return _Parser(
    f"vit-jax {verb}",
    usage=usage and f"vit-jax {verb} {usage}",
    description=description,
    epilog="\n".join(example_lines(example)),
    formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
      prog, max_help_position=28, width=80
    ),
  )


def local_folder(path: str) -> str:
  """Returns the folder of a flag; raises for a bucket, as argparse asks for."""
  if "://" in path:
    raise argparse.ArgumentTypeError(
      f"got {path!r}, expected a folder on this machine; copy it afterwards:"
      f" gcloud storage cp -r FOLDER {path}"
    )
  return path


def example_lines(example: str) -> list[str]:
  """Returns the lines that end a help text.

  Args:
    example: Command lines as a user types them, each a line.
  """
  lines = example.splitlines()
  head = "example:" if len(lines) == 1 else "examples:"
  return [head, *(f"  {line}" for line in lines)]

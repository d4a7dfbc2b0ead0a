"""One command for all: `vit-jax VERB ...`, or `python -m vit_jax VERB ...`."""

import atexit
import errno
import gc
import os
import signal
import sys

from vit_jax import __version__
from vit_jax.commands import COMMANDS
from vit_jax.options import NOT_LEAN, nearest

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or a user's share of it


def help_text() -> str:
  """Returns what each verb does, a line each."""
  width = max(map(len, COMMANDS))
  return "\n".join(
    [
      "usage: vit-jax VERB ...",
      "",
      *(
        f"  {verb:<{width}}  {command.about}"
        for verb, command in COMMANDS.items()
      ),
      "",
      "vit-jax VERB --help says more; vit-jax --version prints the version.",
    ]
  )


def main() -> None:
  """Runs `run`; ends without a traceback for what is no fault of the code.

  Where what it prints is cut off, the status is that of a process ended by
  SIGPIPE, as of `ls | head -1`; after Ctrl-C it is that of one ended by SIGINT.
  """
  sys.excepthook = tell
  # Python would look through all objects for garbage when it ends: 3 s with
  # jax and TensorFlow imported, on 2 busy cores, against 0.3 s.
  atexit.register(gc.freeze)
  try:
    try:
      run()
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    try:
      print(flush=True)  # fails where it was the standard output that failed
    except BrokenPipeError:
      discard_output()
      sys.exit(128 + signal.SIGPIPE)
    raise


def discard_output() -> None:
  """Drops what is still to be printed, which Python would try at exit."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(kind, error, trace) -> None:
  """Prints what ends the process: a sentence, or else the traceback."""
  if issubclass(kind, KeyboardInterrupt):
    print("\nvit-jax: stopped by Ctrl-C.", file=sys.stderr)
  elif issubclass(kind, OSError) and error.errno in FULL:
    where = error.filename or "what is written"
    print(f"vit-jax: {where}: {error.strerror}.", file=sys.stderr)
    discard_output()  # `main` has tried to print it
  elif issubclass(kind, ModuleNotFoundError) and error.name in NOT_LEAN:
    print(
      f"vit-jax: {error.name} is not installed, and this command needs it: pip"
      " install '.[train]' in the checkout of vit_jax.",
      file=sys.stderr,
    )
  else:
    sys.__excepthook__(kind, error, trace)


def run(argv: list[str] | None = None) -> None:
  """Runs the command of the verb, and ends the process with its status."""
  verb, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
  if verb in ("--help", "-h", "help"):
    print(help_text())
  elif verb == "--version":
    print(__version__)
  elif verb not in COMMANDS:
    sys.exit(
      f"vit-jax: got {verb!r}, expected a verb.{nearest(verb, COMMANDS)}\n\n"
      + help_text()
    )
  else:
    sys.exit(COMMANDS[verb].main(rest))


if __name__ == "__main__":
  main()

"""The command line: `vit-jax VERB ...`, or `python -m vit_jax VERB ...`."""

import atexit
import errno
import gc
import logging
import os
import signal
import sys

from vit_jax.commands import COMMANDS
from vit_jax.distributed import exit_codes
from vit_jax.distributed.signals import die_by
from vit_jax.options import NOT_LEAN, nearest
from vit_jax.version import __version__

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk or quota


def help_text() -> str:
  """Returns one line per verb."""
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
      "Modules of your own (my_lab.mae:MAE) are found in the current folder.",
    ]
  )


def main(argv: list[str] | None = None) -> None:
  """Runs the command line; expected errors print a sentence and no traceback.

  If the reader of the output closes it, as in `ls | head -1`, the exit status
  is 128 + SIGPIPE. Ctrl-C ends the process by SIGINT.
  """
  # Imports and traces make a million objects that live on. At its default, 700
  # new objects, Python looks through them for garbage again and again.
  gc.set_threshold(50_000)
  # Modules that a config imports may be beside where the user stands. `python
  # -m` finds them, too; here they are last, and hide no installed module.
  sys.path.append(os.getcwd())
  # Without it Python collects garbage at exit, which takes 3 s after imports of
  # jax and TensorFlow (2 busy cores) in place of 0.3 s.
  atexit.register(gc.freeze)
  logging.basicConfig(format="%(message)s")
  try:
    try:
      run(argv)
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    try:
      print(flush=True)  # fails if it is the standard output that is closed
    except BrokenPipeError:
      discard_output()
      sys.exit(128 + signal.SIGPIPE)
    raise
  except KeyboardInterrupt:
    print("\nvit-jax: stopped by Ctrl-C.", file=sys.stderr)
    die_by(signal.SIGINT)
  except OSError as e:
    if e.errno not in FULL:
      raise
    discard_output()  # the output may be what is full
    sys.exit(f"vit-jax: {e.filename or 'the output'}: {e.strerror}.")
  except ModuleNotFoundError as e:
    if e.name not in NOT_LEAN:
      raise
    sys.exit(
      f"vit-jax: {e.name} is not installed, and this command needs it:"
      " install vit_jax with its extra 'train' (README.md, Install)."
    )
  except (AssertionError, RuntimeError) as e:  # jax has no type of its own
    if not lacks_device(e):
      raise
    reason = str(e).partition("\n")[0] or "no device is visible"
    exit_codes.say(
      f"vit-jax: jax has no such device: {reason} JAX_PLATFORMS=cpu before the"
      " command computes on the CPU."
    )
    sys.exit(exit_codes.EXIT_ERROR)


def lacks_device(error: Exception) -> bool:
  """Whether an error says that jax has no device.

  Of several platforms ("cpu,tpu") jax names an absent one only once. Without a
  visible GPU it raises an AssertionError without a text.
  """
  if str(error).startswith("Unable to initialize backend"):
    return True
  try:
    "jax" in sys.modules and sys.modules["jax"].devices()
  except (AssertionError, RuntimeError):
    return True
  return False


def discard_output() -> None:
  """Discards buffered output, which Python would try to print at exit."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(argv: list[str] | None = None) -> None:
  """Runs the command of the verb; a status other than 0 ends the process."""
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
  elif status := COMMANDS[verb].main(rest):
    sys.exit(status)


if __name__ == "__main__":
  main()

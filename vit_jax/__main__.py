"""The command line: `vit-jax VERB ...`, or `python -m vit_jax VERB ...`."""

import atexit
import errno
import gc
import logging
import os
import re
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
  is that of SIGPIPE. After Ctrl-C it is that of SIGINT.
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
      f"vit-jax: {e.name} is not installed, and this command needs it: pip"
      " install '.[train]' in the checkout of vit_jax."
    )
  except (AssertionError, RuntimeError) as e:  # jax has no type of its own
    if not (text := no_device(e)):
      raise
    exit_codes.say(f"vit-jax: {text}")
    sys.exit(exit_codes.EXIT_ERROR)


def no_device(raised: Exception | None = None) -> str | None:
  """Returns why jax has no device; None if it has one or was not imported.

  Args:
    raised: What ended the command. Of several platforms ("cpu,tpu") jax names
      an absent one only once, and then goes on with the others.
  """
  if not (jax := sys.modules.get("jax")):
    return None
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as e:
    error = str(e)
  else:
    error = str(raised)
    if not error.startswith("Unable to initialize backend"):
      return None
  # jax reads both, and JAX_PLATFORMS=cpu would not undo the other.
  names = "JAX_PLATFORMS", "JAX_PLATFORM_NAME"
  wanted = {name: v for name in names if (v := os.environ.get(name))}
  place = " ".join(f"{name}={value}" for name, value in wanted.items())
  place += ": " if place else ""
  on_cpu = " ".join(f"{name}=cpu" for name in wanted or names[:1])
  if "in use" in error or "lockfile" in error:
    pid = re.search(r"by process with pid (\d+)", error)
    who = f"process {pid[1]}" if pid else "another process"
    return (
      f"{place}the TPU is already in use by {who}, and only one process can use"
      f" it at a time. Wait until that process ends, or put {on_cpu}"
      " before the command to compute on the CPU."
    )
  reason = re.sub(r"^Unable to initialize backend '\w+': ", "", error)
  reason = reason.partition("\n")[0].partition(" (")[0].rstrip(".")
  return (
    f"{place}jax has no such device here"
    f" ({reason or 'none is visible'}). Use a machine that has one, and install"
    f" vit_jax there as '.[cuda]' or '.[tpu]'; or put {on_cpu} before"
    " the command to compute on the CPU."
  )


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

"""One command for all: `vit-jax VERB ...`, or `python -m vit_jax VERB ...`."""

import runpy
import sys

from vit_jax import __version__
from vit_jax.config.commands import COMMANDS
from vit_jax.options import nearest


def help_text() -> str:
  """Returns what each verb does, a line each."""
  width = max(map(len, COMMANDS))
  return "\n".join(
    [
      "usage: vit-jax VERB ...",
      "",
      *(f"  {verb:<{width}}  {doc}" for verb, doc in COMMANDS.items()),
      "",
      "vit-jax VERB --help says more; vit-jax --version prints the version.",
    ]
  )


def main(argv: list[str] | None = None) -> None:
  """Runs the module of the verb as `python -m` does."""
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
    sys.argv = [f"vit-jax {verb}", *rest]
    runpy.run_module(f"vit_jax.{verb}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()

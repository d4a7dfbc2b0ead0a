"""Times the train step of a config: `vit-jax benchmark --config=FILE`."""

from collections.abc import Sequence

from vit_jax.config import cli

FLAGS = {
  "input": "synthetic (default): one batch that stays on the device; real:"
  " batches as in training",
  "steps": "timed steps, after a warm-up (default: 50)",
  "json": "print one line of JSON instead of a table",
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the arguments after the verb."""
  return cli.parse(
    "benchmark",
    FLAGS,
    argv,
    switches=("json",),
    description="Times the train step of a config on this machine. Nothing is"
    " written.",
    example="vit-jax benchmark --config=vit_b16 --config.data.batch_size=256",
  )


def main(argv: Sequence[str]) -> None:
  """Times the step and prints the result."""
  args = parse(argv)
  from vit_jax.tools import benchmark

  benchmark.main(args)

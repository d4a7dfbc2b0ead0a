"""Compiles a run for TPUs, without TPUs: `vit-jax plan --config=FILE`."""

import os
from collections.abc import Sequence

from vit_jax.config import cli
from vit_jax.distributed import signals

FLAGS = {
  "topology": "TPU slice, such as v3:4x4, v4:4x4x4, v5e:16x16, v5p:4x4x4,"
  " v6e:16x16, tpu7x:4x4x4, or v5litepod-256; append ,slices=2 for two slices",
  "input_rate": "images per second that one core decodes (default: as measured"
  " on an AMD EPYC)",
  "price_per_chip_hour": "price of a chip for an hour, such as 1.2 or 1.2USD;"
  " the table then has the price of the run",
  "json": "print one line of JSON instead of a table",
  "all": "compile all programs of the run, not only the train step",
  "search": "search for the fastest mesh, microbatch, remat, scan and batch",
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the arguments after the verb."""
  return cli.parse(
    "plan",
    FLAGS,
    argv,
    switches=("json", "all", "search"),
    description="Compiles a run for TPUs on a machine without TPUs (Linux,"
    " Python 3.12 or later, the extras train and tpu), and estimates memory,"
    " time and cost.",
    example="vit-jax plan --config=vit_l16:imagenet21k --topology=v5e:16x16",
  )


def main(argv: Sequence[str]) -> None:
  """Prints the plan, or ends the process with all errors."""
  signals.end_at_once()
  args = parse(argv)
  # This machine only runs the compiler; a training run may use its devices.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from vit_jax.tools.planning import plan

  plan.main(args)

"""Scores a checkpoint: `vit-jax evaluate --checkpoint=RUN`."""

from collections.abc import Sequence

from vit_jax.config import cli

PROBES = {
  "fewshot": "data set (folder:/path), learned from a few images a class",
  "linear": "the same, by a linear layer trained by gradient",
  "knn": "the same, by the vote of the nearest images",
}
FLAGS = {
  "checkpoint": "run, one of its checkpoints, or published weights",
  **PROBES,
  "workdir": "folder whose evaluation.jsonl gets a line (default: the run)",
  "mean": "of its training images, if unsaid: imagenet, clip or MEAN/STD",
  "dtype": "with these on published weights: float32 or bfloat16",
  "json": "print that line, and nothing else on the standard output",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the arguments after the verb."""
  return cli.parse(
    "evaluate",
    FLAGS,
    argv,
    switches=("json",),
    alone=tuple(PROBES),
    description="Scores a checkpoint; with --fewshot, --linear or --knn its"
    " features.",
    example="vit-jax evaluate --checkpoint=runs/b16\n"
    "vit-jax evaluate --checkpoint=B_16.npz --fewshot=folder:/data/birds",
  )


def main(argv: Sequence[str]) -> None:
  """Scores, or ends the process with all that is wrong."""
  args = parse(argv)
  from vit_jax.scoring import evaluate

  evaluate.main(args)

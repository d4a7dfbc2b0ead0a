"""Scores a checkpoint: `vit-jax evaluate --checkpoint=RUN`."""

from collections.abc import Sequence

from vit_jax.config import cli

PROBES = {
  "fewshot": "data set (folder:/path); scores features by few labels",
  "linear": "data set; scores features by a linear layer on all labels",
  "knn": "data set; scores features by a vote of the nearest images",
}
FLAGS = {
  "checkpoint": "run, one of its checkpoints, or published weights",
  **PROBES,
  "workdir": "folder of evaluation.jsonl (default: the run or runs/<file>)",
  "mean": "normalisation in training: half, imagenet, clip or MEAN/STD",
  "dtype": "float32 or bfloat16, for features of published weights",
  "json": "print only the line of evaluation.jsonl",
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
    description="Scores a checkpoint, or its features with --fewshot, --linear"
    " or --knn.",
    example="vit-jax evaluate --checkpoint=runs/b16\n"
    "vit-jax evaluate --checkpoint=B_16.npz --fewshot=folder:/data/birds",
  )


def main(argv: Sequence[str]) -> None:
  """Scores the checkpoint, or ends the process with all errors."""
  args = parse(argv)
  from vit_jax import evaluate

  evaluate.main(args)

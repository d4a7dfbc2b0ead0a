"""Scores a checkpoint: `vit-jax evaluate --checkpoint=RUN`."""

from collections.abc import Sequence

from vit_jax.config import cli

PROBES = {
  "fewshot": "score features on a data set (folder:/path) by few labels",
  "linear": "the same, by a linear layer trained on all labels",
  "knn": "the same, by a vote of the nearest labelled images",
}
FLAGS = {
  "checkpoint": "run, one of its checkpoints, or published weights",
  **PROBES,
  "workdir": "folder whose evaluation.jsonl gets a line (default: the run)",
  "mean": "normalisation in training: imagenet, clip or MEAN/STD",
  "dtype": "for features of published weights: float32 or bfloat16",
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
  """Scores, or ends the process with all that is wrong."""
  args = parse(argv)
  from vit_jax.scoring import evaluate

  evaluate.main(args)

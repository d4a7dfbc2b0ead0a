"""Scores a checkpoint: `vit-jax evaluate --checkpoint=RUN`."""

from collections.abc import Sequence

from vit_jax.config import cli

PROBES = {
  "fewshot": "data set (folder:/path) on which features are scored by ridge"
  " regression on few labels",
  "linear": "data set, scored by a linear layer trained on all labels",
  "knn": "data set, scored by a vote of the nearest labelled images",
}
FLAGS = {
  "checkpoint": "run, one of its checkpoints, or published weights",
  **PROBES,
  "workdir": "folder of evaluation.jsonl, which gets a line (default: the run)",
  "mean": "normalisation of the training images: imagenet, clip or MEAN/STD",
  "dtype": "type of the products for features of published weights: float32 or"
  " bfloat16",
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
    description="Scores a checkpoint on the evaluators of its config. With"
    " --fewshot, --linear or --knn, scores its features.",
    example="vit-jax evaluate --checkpoint=runs/b16\n"
    "vit-jax evaluate --checkpoint=B_16.npz --fewshot=folder:/data/birds",
  )


def main(argv: Sequence[str]) -> None:
  """Scores the checkpoint, or ends the process with all errors."""
  args = parse(argv)
  from vit_jax.scoring import evaluate

  evaluate.main(args)

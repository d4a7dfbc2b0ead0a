"""Top-1 and top-5 among some classes of ImageNet: ImageNet-A's and -R's 200.

The published scores of these two sets leave out all columns of the head but the
200 of their classes. The same columns on ImageNet's own images of these classes
give the "clean" accuracy that they are compared to. (An evaluator of kind
"classification" takes the largest of all logits, which gives a lower score.)

Source: arXiv:1907.07174, section 4, and arXiv:2006.16241.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from vit_jax import class_names
from vit_jax.evaluators.classification import (
  Classification,
  ClassificationConfig,
)
from vit_jax.evaluators.evaluator import Context, Evaluator, Outputs, Splits
from vit_jax.evaluators.imagenet_subsets import SUBSETS
from vit_jax.options import option

NUM_CLASSES = 1000  # of ImageNet-1k, which the subsets number


@dataclasses.dataclass(frozen=True)
class SubsetConfig(ClassificationConfig):
  """Top-1, top-5 and loss among 200 classes of ImageNet."""

  kind: str = "subset"
  split: str = option("test", "split to score, every example once")
  classes: str = option(
    "imagenet_a",
    "classes that can be predicted; images of other classes do not count",
    {
      "imagenet_a": "the 200 of ImageNet-A",
      "imagenet_r": "the 200 of ImageNet-R",
    },
  )

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    name = (self.dataset or "").split("/")[0].split(":")[0]
    if name in SUBSETS and name != self.classes:
      yield (
        f"{where}.classes: got {self.classes!r} for the data set"
        f" {self.dataset!r}, expected {name!r}; for a prediction among all"
        f" classes {where}.kind='classification'."
      )

  def check(
    self, where: str, sources: Splits, head: class_names.Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error if the data do not have ImageNet's classes, too."""
    yield from super().check(where, sources, head, out)
    source = sources["split"]
    names, known = source.class_names, class_names.imagenet1k()
    if source.num_classes != NUM_CLASSES or (
      names and known and names != known
    ):
      yield (
        f"{where}.dataset: got {source.name!r} with {source.num_classes:,}"
        f" classes, expected the {NUM_CLASSES:,} of ImageNet in the order of"
        f" their wnids, of which {where}.classes={self.classes!r} are some."
      )

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    classes = np.array(SUBSETS[self.classes])
    evaluator = Classification(context, classes)
    evaluator.note += f", among the {len(classes)} of {self.classes}"
    return evaluator

"""Evaluators of `handmade`, whose records are read without TensorFlow."""

import handmade
import numpy as np

from vit_jax.batch import Batch
from vit_jax.eval_context import RunContext


class InMemory(RunContext):
  def batches(self, source, indices=None):
    rows, num = self.options.batch_size, source.num_examples
    order = np.arange(num) if indices is None else np.unique(indices)
    label = source.table.astype(source.label_spec.dtype.as_numpy_dtype)
    for start in range(0, max(len(order), 1), rows):
      index = order[start : start + rows]
      missing = rows - len(index)
      pad = lambda x, m=missing: np.pad(x, [(0, m), *[(0, 0)] * (x.ndim - 1)])
      pixels = np.stack([index % 256, index // 256, index * 0], 1)
      image = np.tile(pixels[:, None, None].astype(np.uint8), (1, 4, 4, 1))
      yield Batch(
        image=pad(image),
        label=pad(label[index]),
        mask=np.arange(rows) < len(index),
        index=np.pad(index, (0, missing), constant_values=-1),
      )


def errors(options, source, head=handmade.NO_HEAD, **out):
  """Returns the errors of options on records, where `out` is a model's."""
  sources = dict.fromkeys(options.SPLITS, source)
  found = options.check("evals.e", sources, head, out)
  return [*options.errors("evals.e"), *found]


def probe(options, train, test, num_classes):
  """Returns the evaluator of records with these labels, by their split."""
  of = (handmade.records(labels, num_classes) for labels in (train, test))
  return evaluator(options, dict(zip(options.SPLITS, of, strict=True)))


def evaluator(options, sources, head=0, names=None, **changes):
  """Returns the evaluator of options, see `handmade.context`."""
  context = handmade.context(options, sources, head, names, **changes)
  return options.make(InMemory(**vars(context)))

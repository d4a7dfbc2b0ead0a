"""What an evaluator gets from its run: labels, batches, compiled functions."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.batch import Batch
from vit_jax.config.preprocessing import for_channels
from vit_jax.evaluators.evaluator import Context
from vit_jax.sharding import replicated, to_global


def labels_of(source: Any) -> np.ndarray:
  """Returns the labels of a `Source`; see `Context.labels`. Collective."""
  from vit_jax.data.subsets import Subset

  num, count = source.num_examples, jax.process_count()
  if source.knows_labels or count == 1:
    return source.labels()
  size = -(-num // count)  # of a part; the last ones may have fewer
  part = np.arange(num)[jax.process_index() * size :][:size]
  spec = source.label_spec
  mine = np.zeros([size, *spec.shape], spec.dtype.as_numpy_dtype)
  if len(part):
    mine[: len(part)] = Subset.of(source, part, source.split).labels()
  return multihost_utils.process_allgather(mine).reshape(-1, *spec.shape)[:num]


@dataclasses.dataclass(frozen=True)
class RunContext(Context):
  """The `Context` of a run: data by TensorFlow, arrays on its mesh.

  TensorFlow is imported where records are read: the planner reads none.
  """

  def jit(self, fn: Callable[[Any, dict], Any]) -> Callable:
    return jax.jit(fn, out_shardings=replicated(self.mesh))

  def labels(self, source: Any) -> np.ndarray:
    return labels_of(source)

  def batches(
    self, source: Any, indices: np.ndarray | None = None
  ) -> Iterator[Batch]:
    from vit_jax.data.pipeline import eval_reader

    ops = for_channels(self.options.ops, self.config.model.channels)
    options = {"ops": ops, "batch_size": self.options.batch_size}
    wanted = None if indices is None else indices.tobytes()
    # The reader keeps the source, whose number is thus not given to another.
    reader = self.once(
      ("reader", id(source), *options.values(), wanted),
      lambda: eval_reader(
        source,
        **options,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        indices=indices,
      ),
    )
    return reader()

  def augmented(
    self, source: Any, indices: np.ndarray, ops: str, seed: int
  ) -> Iterator[Batch]:
    from vit_jax.data.pipeline import train_batches
    from vit_jax.data.subsets import Subset

    return train_batches(
      Subset.of(source, indices, source.split),
      for_channels(ops, self.config.model.channels),
      batch_size=self.options.batch_size,
      seed=seed,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )

  def forward(
    self, fn: Callable, params: Any, batches: Iterable[Batch]
  ) -> Iterator[Any]:
    before = None
    for batch in batches:
      self.on_batch()
      results = fn(params, to_global(batch, self.mesh))
      jax.tree.map(lambda x: x.copy_to_host_async(), results)
      if before is not None:
        yield jax.device_get(before)
      before = results
    if before is not None:
      yield jax.device_get(before)

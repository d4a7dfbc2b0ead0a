"""The evaluators of a run, and what each of them gets: its `Context`."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.batch import Batch
from vit_jax.data.preprocessing import for_channels
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Params,
  Split,
)
from vit_jax.microbatch import few_at_a_time
from vit_jax.sharding import replicated, to_global

if TYPE_CHECKING:
  from vit_jax.data.source import Source


def labels_of(source: "Source") -> np.ndarray:
  """Returns all labels of a split; see `Context.labels`. Collective."""
  from vit_jax.data.subsets import Subset

  num, count = source.num_examples, jax.process_count()
  if source.knows_labels or count == 1:
    return source.labels()
  size = -(-num // count)  # records of a part; the last parts may have fewer
  part = np.arange(num)[jax.process_index() * size :][:size]
  spec = source.label_spec
  mine = np.zeros([size, *spec.shape], spec.dtype.as_numpy_dtype)
  if len(part):
    mine[: len(part)] = Subset.of(source, part, source.split).labels()
  return multihost_utils.process_allgather(mine).reshape(-1, *spec.shape)[:num]


def forward(
  fn: Callable,
  params: Any,
  batches: Iterable[Batch],
  mesh: jax.sharding.Mesh,
  on_batch: Callable[[], None],
) -> Iterator[Any]:
  """Yields the results of a function for each batch; see `Context.forward`."""
  before = None
  for batch in batches:
    on_batch()
    results = fn(params, to_global(batch, mesh))
    jax.tree.map(lambda x: x.copy_to_host_async(), results)
    if before is not None:
      yield jax.device_get(before)
    before = results
  if before is not None:
    yield jax.device_get(before)


def activated(
  fn: Callable,
  params: Params,
  batches: Iterable[Batch],
  mesh: jax.sharding.Mesh,
  on_batch: Callable[[], None],
) -> Iterator[Batch]:
  """Yields batches with activations in place of images.

  Args:
    fn: (params, global batch) -> activations of its images, jitted.
    params: First argument of `fn`.
    batches, mesh, on_batch: See `forward`.
  """
  labels: collections.deque[dict] = collections.deque()

  def noted():
    for batch in batches:
      labels.append({k: v for k, v in batch.items() if k != "image"})
      yield batch

  for x in forward(fn, params, noted(), mesh, on_batch):
    yield Batch(image=x, **labels.popleft())


class Evaluators(list[Evaluator]):
  """The evaluators of a run, in the order of the config; a context.

  At its end, the arrays that they share are freed without waiting for gc.

  Args:
    evaluators: The evaluators.
    total_steps: The step after which the run ends; None if it does not train.
    at_start: Name of the evaluator that also scores the state at step 0; None
      for none.
  """

  def __init__(
    self,
    evaluators: Iterable[Evaluator],
    total_steps: int | None = None,
    at_start: str | None = None,
  ):
    super().__init__(evaluators)
    self._total_steps, self._at_start = total_steps, at_start

  def due(self, step: int) -> list[Evaluator]:
    """Returns the evaluators that score the parameters of a step."""

    def is_due(config: EvaluatorConfig) -> bool:
      if not step:
        return config.at_start or config.name == self._at_start
      every = config.every_steps
      return (every > 0 and step % every == 0) or step == self._total_steps

    return [e for e in self if is_due(e.config)]

  def notes(self, dataset: str) -> str:
    """Returns a line for each evaluator of another data set than this one."""
    return "\n".join(
      f"{e.config.name:<11} {e.note}"
      for e in self
      if e.config.dataset != dataset
    )

  def __enter__(self) -> "Evaluators":
    return self

  def __exit__(self, *error) -> None:
    for evaluator in self:
      evaluator.context.shared.clear()


@dataclasses.dataclass(frozen=True)
class RunContext(Context):
  """The `Context` of a run: data by TensorFlow, arrays on the run's mesh.

  It imports TensorFlow only in the methods that read records, because the
  planner reads none.

  Attributes:
    cached_part: (params, images) -> activations of the part of the model that
      is frozen, which `for_logits` computes once; None to compute no part once.
  """

  cached_part: Callable[[Params, jax.Array], jax.Array] | None = None

  def jit(self, fn: Callable[[Params, dict], Any]) -> Callable:
    return jax.jit(fn, out_shardings=replicated(self.mesh))

  def labels(self, source: Split) -> np.ndarray:
    return labels_of(source)

  def batches(
    self, source: Split, indices: np.ndarray | None = None
  ) -> Iterator[Batch]:
    from vit_jax.data.pipeline import eval_reader

    ops = for_channels(self.options.ops, self.config.model.channels)
    options = {"ops": ops, "batch_size": self.options.batch_size}
    wanted = None if indices is None else indices.tobytes()
    # The reader refers to the source, so no later object gets its id.
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
    self, source: Split, indices: np.ndarray, ops: str, seed: int
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

  def for_logits(self, source: Split, params: Params) -> Iterable[Batch]:
    if self.cached_part is None:
      return self.batches(source)

    def activations() -> list[Batch]:
      devices = [*self.mesh.devices.flat]
      fn = self.jit(
        lambda params, batch: few_at_a_time(
          functools.partial(self.cached_part, params), batch["image"], devices
        )
      )
      batches = self.batches(source)
      return [*activated(fn, params, batches, self.mesh, self.on_batch)]

    options = self.options.ops, self.options.batch_size
    return self.once(("activations", id(source), *options), activations)

  def forward(
    self, fn: Callable, params: Any, batches: Iterable[Batch]
  ) -> Iterator[Any]:
    return forward(fn, params, batches, self.mesh, self.on_batch)

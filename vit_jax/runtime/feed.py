"""The batches of a run, from the step on at which it goes on."""

from collections.abc import Iterator
from typing import Any

import jax

from vit_jax.batch import Batch, checked


def batches(run: Any, start: int) -> Iterator[Batch]:
  """Yields the batches of this process, each checked.

  Args:
    run: A `prepare.Run` that was checked.
    start: Steps done.

  Raises:
    DataError: As `batch.checked`.
  """
  index, count = jax.process_index(), jax.process_count()
  return checked(
    run.data.batches(start, index, count),
    rows=run.config.data.batch_size // count,
    image_size=run.facts.image_size,
    num_classes=run.facts.num_classes,
    start_step=start,
    process_index=index,
    process_count=count,
  )

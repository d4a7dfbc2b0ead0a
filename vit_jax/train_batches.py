"""The batches of a run, from the step on at which it goes on."""

from collections.abc import Iterator
from typing import Any

import jax

from vit_jax import sharding
from vit_jax.batch import Batch, checked
from vit_jax.callbacks import accounting, startup


def batches(
  run: Any, start: int, metadata: dict[str, Any] | None = None
) -> Iterator[Batch]:
  """Yields the batches of this process, each checked.

  They go on behind the images that were seen, also where the run had batches of
  another size before.

  Args:
    run: A `prepare.Run` that was checked.
    start: Steps done.
    metadata: Of the checkpoint of that step; None: the one that the run resumes
      with.

  Raises:
    DataError: As `batch.checked`.
  """
  index, count = jax.process_index(), jax.process_count()
  metadata = run.resumed_metadata if metadata is None else metadata
  batch_size = run.config.data.batch_size
  first = accounting.batches_seen(metadata, start, batch_size)
  return checked(
    run.data.batches(first, index, count),
    rows=batch_size // count,
    image_size=run.facts.image_size,
    num_classes=run.facts.num_classes,
    start_step=start,
    process_index=index,
    process_count=count,
  )


def on_devices(
  batches: Iterator[Batch], mesh: jax.sharding.Mesh, opening: startup.Start
) -> Iterator[dict[str, jax.Array]]:
  """Yields the batches of all processes as arrays on the devices.

  Args:
    batches: Of this process.
    mesh: Mesh of the run.
    opening: Is told when the first one is there.
  """
  for number, batch in enumerate(batches):
    batch = sharding.to_global(batch, mesh)
    if number == 0:
      opening.ends("first batch")
    yield batch

"""A jitted function over the batches of a split."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.batch import Batch
from vit_jax.sharding import to_global


def forward(
  fn: Callable[[Any, dict[str, jax.Array]], Any],
  params: Any,
  batches: Iterable[Batch],
  mesh: Mesh,
) -> Iterator[Any]:
  """Yields what the function makes of each batch, as numpy arrays.

  A batch is handed to the devices before the host waits for the results of
  the one before, so that they have work while the host fetches and decodes.

  Args:
    fn: (params, global batch) -> tree of arrays; jitted, replicated.
    params: Its first argument.
    batches: The parts that this process reads.
    mesh: Rows are split over its axes data and fsdp.
  """
  before = None
  for batch in batches:
    results = fn(params, to_global(batch, mesh))
    jax.tree.map(lambda x: x.copy_to_host_async(), results)
    if before is not None:
      yield jax.device_get(before)
    before = results
  if before is not None:
    yield jax.device_get(before)

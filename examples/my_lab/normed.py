"""An optimizer: AdamW whose update of each parameter has a bounded size."""

import optax


def normed_adam(b1: float = 0.9, limit: float = 1.0):
  """Returns Adam's scaling, then clipping by the root mean square.

  Learning rate, weight decay and layer decay are applied by the run.
  """
  return optax.chain(optax.scale_by_adam(b1), optax.clip_by_block_rms(limit))

"""How a train step differs by kind of chip: a row of `CHOICES` each.

A choice decides what is saved for the backward pass, or how much is computed at
once. The results are the same up to rounding. Choices apply only inside the
step, where `shard_map` gives each device its own images; elsewhere images may
be spread over devices. Gains: benchmarks/notes/performance_log.md.
"""

from typing import NamedTuple

import jax

from vit_jax.devices import generation


class Choices(NamedTuple):
  """The choices for one kind of chip.

  max_scores: Attention runs on so few images at a time that they have at most
    this many scores (images x heads x queries x keys), which then fit the
    chip's fast memory; None for all images at once.
  save_weights: Whether the backward pass gets the attention weights from the
    forward pass instead of recomputing them.
  save_slope: Whether the backward pass gets the derivative of GELU and dropout
    from the forward pass instead of recomputing both. This is faster if the
    matrix unit is so fast that they take longer than the products around them.
  """

  max_scores: int | None = None
  save_weights: bool = False
  save_slope: bool = False


# 128 MiB of fast memory hold the scores of L/16 of 16 images at 224 px, or of 2
# at 384 px.
MAX_SCORES = 11_000_000

# Generation of a chip, as in `devices.CHIPS` -> its choices.
CHOICES = {
  "v4": Choices(save_weights=True),
  "v5e": Choices(max_scores=MAX_SCORES),
  "v5p": Choices(save_weights=True),
  "v6e": Choices(max_scores=MAX_SCORES, save_slope=True),
  "tpu7x": Choices(save_weights=True, save_slope=True),
}


class StepDevice(NamedTuple):
  """The device that a train step is traced for."""

  platform: str
  choices: Choices


def device_of_step() -> StepDevice | None:
  """Returns the device of the train step being traced, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device if mesh.manual_axes else None
  if not device:
    return None
  choices = CHOICES.get(generation(device.device_kind), Choices())
  return StepDevice(device.platform, choices)

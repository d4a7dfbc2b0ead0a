"""For which chip a model is traced."""

import jax

from vit_jax.devices import generation


def chip_of_step() -> tuple[str, str]:
  """Returns platform and generation inside a train step, else "" twice."""
  mesh = jax.sharding.get_abstract_mesh()
  # Inside the shard_map of a step the images are the device's own. Elsewhere
  # they may be spread over devices, and a piece of them would have to be
  # gathered.
  device = mesh.abstract_device if mesh.manual_axes else None
  if not device:
    return "", ""
  return device.platform, generation(device.device_kind)

"""How much arithmetic a step is."""

from vit_jax.config import ModelConfig
from vit_jax.families.geometry import patch_grid, size, stages


def forward_macs(
  model: ModelConfig, image_size: tuple[int, int], num_classes: int
) -> int:
  """Returns multiply-adds of one image's forward pass, products only.

  Args:
    model: Sizes and pooling.
    image_size: (height, width) in pixels.
    num_classes: Width of the head.
  """
  trunk, channels = _trunk_macs(model, image_size)
  if model.name != "vit":
    return trunk + channels * num_classes
  sizes, patch = size(model)
  d, mlp = sizes.width, sizes.mlp_dim
  grid_h, grid_w = patch_grid(model, image_size)
  patches = grid_h * grid_w
  tokens = patches + (model.pool == "token")
  block = tokens * (4 * d * d + 2 * d * mlp) + 2 * tokens * tokens * d
  if model.posemb == "relative":
    block += tokens * (2 * tokens - 1) * d
  pool = 0
  if model.pool == "map":  # one query attends to all tokens, then an MLP
    pool = 2 * tokens * d * d + 2 * d * d + 2 * tokens * d + 2 * d * mlp
  head = d * num_classes + (d * d if model.pre_logits else 0)
  stem = patches * patch * patch * channels * d
  return trunk + stem + sizes.depth * block + pool + head


def _trunk_macs(
  model: ModelConfig, image_size: tuple[int, int]
) -> tuple[int, int]:
  """Multiply-adds of the ResNet, and channels of its last map."""
  found = stages(model)
  if found is None:
    return 0, 3
  width = round(64 * found.width)
  height, columns = (-(-side // 2) for side in image_size)
  macs = height * columns * 7 * 7 * 3 * width
  height, columns = -(-height // 2), -(-columns // 2)
  points = height * columns
  channels = width
  for i, num_units in enumerate(found.blocks):
    narrow = width * 2**i
    for unit in range(num_units):
      before = points
      if i > 0 and unit == 0:
        height, columns = -(-height // 2), -(-columns // 2)
        points = height * columns
      macs += before * channels * narrow + points * 13 * narrow * narrow
      if channels != 4 * narrow or before != points:
        macs += points * channels * 4 * narrow
      channels = 4 * narrow
  return macs, channels


def train_flops(
  model: ModelConfig, image_size: tuple[int, int], num_classes: int
) -> int:
  """Returns FLOPs of one image's training step: 2 a multiply-add, 3 passes.

  The backward pass costs two forward ones; what is recomputed to save memory
  does not count, as is usual for model FLOPs utilisation (MFU).
  """
  return 6 * forward_macs(model, image_size, num_classes)

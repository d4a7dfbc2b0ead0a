"""Mixup and cutmix: each image is mixed with its neighbour in the batch.

Row r is mixed with row r - 1 of the whole batch, the first row with the last.
One share is drawn per step, from the key of the step. So every row is the same
for any mesh and microbatch that keeps the order of rows. (On TPU slices of
several hosts, the rows of a process are where its chips are in the mesh, so
another slice has other neighbours.) big_vision mixes within the rows of a
device, so that its results depend on the number of devices. timm's partner of
row r of b is b - 1 - r, the reversed batch.
"""

from collections.abc import Iterable
from typing import Any

PARTNER = "partner"  # key of a batch: the rows that its rows are mixed with


def paired(batch: dict, views: Iterable[str] = ("image",)) -> dict:
  """Returns the global batch with the partner of every row.

  One row of each device moves to another, as uint8.

  Args:
    batch: A batch.
    views: Keys of its images.
  """
  import jax.numpy as jnp

  keys = (*views, "label", "mask")
  return {**batch, PARTNER: {k: jnp.roll(batch[k], 1, 0) for k in keys}}


def mix(images, targets, partners, is_there, rng, alpha: float, box: float):
  """Returns the mixed images and targets of some rows.

  Mixup: x <- a x + (1 - a) partner, the same for the targets, where
  a = max(b, 1 - b), b ~ Beta(alpha, alpha): the row itself is always the larger
  part. Cutmix: a box of the partner's pixels, with sides sqrt(1 - b) of the
  image's, b ~ Beta(box, box), at a random centre, clipped to the image; a is
  the exact share of pixels that the row keeps. If both are on, each step uses
  one of them, with probability 1/2.

  Args:
    images: Floats [b, h, w, c].
    targets: Floats [b, classes].
    partners: Images and targets of the partners.
    is_there: bool [b]; False if the partner could not be decoded. The row then
      does not change.
    rng: Key of the step.
    alpha: Alpha of mixup; 0 for off.
    box: Alpha of cutmix; 0 for off.

  Source: arXiv:1710.09412 (the maximum: arXiv:2106.10270's code) and
    arXiv:1905.04899.
  """
  import jax
  import jax.numpy as jnp

  # Other keys than those that linen derives for dropout.
  coin_key, mixup_key, *box_keys = jax.random.split(
    jax.random.fold_in(rng, 2), 5
  )
  _, height, width, _ = images.shape
  weight = jnp.ones((height, width))  # share of the row itself, for each pixel
  if alpha:
    share = jax.random.beta(mixup_key, alpha, alpha)
    weight = jnp.full((height, width), jnp.maximum(share, 1 - share))
  if box:
    outside = 1.0 - _random_box(box_keys, box, height, width)
    is_cutmix = jax.random.bernoulli(coin_key) if alpha else True
    weight = jnp.where(is_cutmix, outside, weight)
  weight = jnp.where(
    is_there[:, None, None, None], weight[None, ..., None], 1.0
  )
  share = weight.mean((1, 2))
  other_images, other_targets = partners
  return (
    weight * images + (1 - weight) * other_images,
    share * targets + (1 - share) * other_targets,
  )


def _random_box(keys: Any, alpha: float, height: int, width: int):
  """Returns floats [height, width], 1 inside the box and 0 outside."""
  import jax
  import jax.numpy as jnp

  side = jnp.sqrt(1 - jax.random.beta(keys[0], alpha, alpha))

  def span(key, size):
    length = jnp.floor(side * size).astype(jnp.int32)
    first = jax.random.randint(key, (), 0, size) - length // 2
    places = jnp.arange(size)
    return (places >= first) & (places < first + length)

  rows, columns = span(keys[1], height), span(keys[2], width)
  return (rows[:, None] & columns[None]).astype(jnp.float32)

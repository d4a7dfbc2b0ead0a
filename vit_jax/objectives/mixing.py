"""Mixup and cutmix: an image and its neighbour in the batch become one.

Row r is mixed with row r - 1 of the whole batch, the first one with the last.
One share is drawn for a step, from the key of the step. So every row is the
same whatever the mesh and the microbatch, where rows are in the same order: on
TPU slices of several hosts the rows of a process are where its chips are in the
mesh, and another slice has other neighbours. (big_vision takes the neighbour
within the rows of a device, so that its results depend on the number of
devices. timm's partner of row r of b is b - 1 - r, the batch reversed.)
"""

from collections.abc import Iterator
from typing import Any

PARTNER = "partner"  # key of a batch: the rows that its rows are mixed with


def errors(**alphas: float) -> Iterator[str]:
  """Yields an error for every option whose alpha is below 0."""
  for name, alpha in alphas.items():
    if alpha < 0:
      yield (
        f"config.objective.{name}: got {alpha}, expected 0 (off) or more, such"
        " as 0.2."
      )


def paired(batch: dict) -> dict:
  """Returns the global batch with the partner of every row.

  One row of each device moves to another, as uint8.
  """
  import jax.numpy as jnp

  keys = ("image", "label", "mask")
  return {**batch, PARTNER: {k: jnp.roll(batch[k], 1, 0) for k in keys}}


def mix(images, targets, partners, is_there, rng, alpha: float, box: float):
  """Returns the mixed images and targets of some rows.

  Mixup: x <- a x + (1 - a) partner, the same for the targets, where a =
  max(b, 1 - b), b ~ Beta(alpha, alpha): the row itself is always the larger
  part. Cutmix: a box of the partner's pixels, with sides of sqrt(1 - b) of
  the image's, b ~ Beta(box, box), anywhere, its outside cut off; a is the share
  of pixels that the row keeps, exactly. Where both are on, half of the steps
  have one, half the other.

  Args:
    images: Floats [b, h, w, c].
    targets: Floats [b, classes].
    partners: Images and targets of the partners.
    is_there: bool [b]; where False, since an image could not be decoded, there
      is no partner, and the row stays as it is.
    rng: Key of the step.
    alpha: Alpha of mixup; 0: off.
    box: Alpha of cutmix; 0: off.

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
  weight = jnp.ones((height, width))  # of the row itself, by pixel
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

"""KoLeo: features are spread by the distance to their nearest neighbour.

Source: arXiv:1806.03198, section 3.2, for the regulariser; arXiv:2304.07193,
  section 4, for its use.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vit_jax.options import ConfigError, unexpected

EPS = 1e-8


def losses(
  features: Float[Array, "b d"],
  valid: Bool[Array, " b"],
  over,
  group: int | None,
) -> Float[Array, " b"]:
  """Returns -log of each row's distance to its nearest neighbour.

  Rows have length 1 first. A row's neighbour is the valid row, other than
  itself, with the largest inner product in the same group. Groups are `group`
  consecutive rows of the whole batch, so that the result does not depend on the
  mesh; the authors' groups are the rows of one GPU. Gradients reach both rows.

  Args:
    features: The rows of this device.
    valid: Whether a row counts; invalid rows have a loss of 0.
    over: Operations over the rows of all devices, see `collectives.Over`.
    group: Rows of a group; None: the whole batch is one group.

  Raises:
    ConfigError: A group has no second row.
  """
  norm = jnp.sqrt(jnp.square(features).sum(-1, keepdims=True))
  features = features / jnp.maximum(norm, EPS)
  everything, counts = over.gather(features), over.gather(valid)
  total = len(everything)
  group = group or total
  if group < 2 or total % group == 1:
    where, got = "config.data.batch_size", f"{total} in groups of {group}"
    expected = (
      "groups of 2 or more rows, for KoLeo's neighbours; see also"
      " config.objective.koleo_group, and koleo=0"
    )
    raise ConfigError([unexpected(where, got, expected)])
  rows, others = over.rows(len(features)), jnp.arange(total)
  fits = (rows[:, None] // group == others[None] // group) & counts[None]
  fits &= rows[:, None] != others[None]
  similar = jax.lax.stop_gradient(features @ everything.T)
  nearest = jnp.where(fits, similar, -jnp.inf).argmax(-1)
  # The authors add eps to each difference, and again to the distance.
  difference = features - everything[nearest] + EPS
  distance = jnp.sqrt(jnp.square(difference).sum(-1))
  return jnp.where(valid & fits.any(-1), -jnp.log(distance + EPS), 0.0)

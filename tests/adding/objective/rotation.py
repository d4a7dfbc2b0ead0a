"""Rotation prediction: by which quarter turn was an image rotated?

Source: arXiv:1803.07728.
"""

import dataclasses
from typing import ClassVar

from vit_jax.batch import normalise
from vit_jax.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Rotation(Objective):
  """The quarter turn by which an image was rotated; without labels."""

  kind: str = "rotation"

  trains_head: ClassVar[bool] = False

  def model_faults(self, model, image_size):
    if image_size[0] != image_size[1]:
      yield (
        f"config.data.ops: got images of {image_size[0]}x{image_size[1]}"
        " pixels, expected squares for config.objective.kind=rotation."
      )

  def make(self, model, facts):
    """See `Objective`; logs `accuracy`."""
    import jax
    import jax.numpy as jnp

    from vit_jax.losses import softmax_xent

    module = model.build(4)

    def turned(image, turns):
      return jnp.select(
        [turns == k for k in range(4)],
        [jnp.rot90(image, k) for k in range(4)],
      )

    def loss_fn(params, batch, rng):
      def draw(record):
        key = jax.random.fold_in(jax.random.fold_in(rng, 1), record)
        return jax.random.randint(key, (), 0, 4)

      turns = jax.vmap(draw)(batch["index"])
      logits, _ = module.apply(
        {"params": params},
        normalise(jax.vmap(turned)(batch["image"], turns)),
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      loss = softmax_xent(logits, jax.nn.one_hot(turns, 4)) * batch["mask"]
      right = (logits.argmax(-1) == turns) * batch["mask"]
      count = jnp.sum(batch["mask"], dtype=jnp.float32)
      return jnp.sum(loss), count, {"accuracy": jnp.sum(1.0 * right)}

    return module, loss_fn

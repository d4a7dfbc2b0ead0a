"""Rotation: by how many quarter turns was an image turned?

Source: arXiv:1803.07728.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import normalise
from vit_jax.objectives.objective import Objective
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Rotation(Objective):
  """Turned images, whose angle is predicted; without labels."""

  kind: str = "rotation"
  turns: int = option(4, "angles to tell apart, a quarter turn each, 2 to 4")

  trains_head: ClassVar[bool] = False  # the head is not of the data's classes

  def errors(self) -> Iterator[str]:
    if not 2 <= self.turns <= 4:
      yield f"config.objective.turns: got {self.turns}, expected 2, 3 or 4."

  def model_errors(self, model, image_size) -> Iterator[str]:
    if image_size[0] != image_size[1]:
      yield (
        f"config.data.ops: got images of {image_size[0]}x{image_size[1]}"
        " pixels, expected squares, which can be turned."
      )

  def make(self, model, run_shape):
    import jax
    import jax.numpy as jnp

    from vit_jax.losses import softmax_xent
    from vit_jax.models import build

    module = build(model, self.turns)

    def loss_fn(params, batch, rng):
      def angle(record):
        key = jax.random.fold_in(jax.random.fold_in(rng, 1), record)
        return jax.random.randint(key, (), 0, self.turns)

      def turned(image, angle):
        ways = [lambda x, k=k: jnp.rot90(x, k) for k in range(self.turns)]
        return jax.lax.switch(angle, ways, image)

      angles = jax.vmap(angle)(batch["index"])
      logits, _ = module.apply(
        {"params": params},
        normalise(jax.vmap(turned)(batch["image"], angles)),
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      loss = softmax_xent(logits, jax.nn.one_hot(angles, self.turns))
      right = (logits.argmax(-1) == angles) * batch["mask"]
      count = jnp.sum(batch["mask"], dtype=jnp.float32)
      named = {"accuracy": jnp.sum(right, dtype=jnp.float32)}
      return jnp.sum(loss * batch["mask"]), count, named

    return module, loss_fn

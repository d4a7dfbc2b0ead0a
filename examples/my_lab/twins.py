"""An objective without labels: two views of an image find each other.

The network's vector of one view is compared with the teacher's vectors of the
other view, those of all images of the batch (InfoNCE). The teacher is a running
mean of the network, as in MoCo (arXiv:1911.05722) and its successors.
"""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import View, normalise
from vit_jax.objectives.objective import Average, Learner, Objective, Targets
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Twins(Objective):
  """Two views of an image find each other in a batch."""

  temperature: float = option(0.2, "divides the cosines, above 0")
  momentum: float = option(0.99, "of the teacher at the start, rises to 1")

  trains_head = False  # no logits of the data's classes
  compares_images = True  # all other images of the batch are the negatives
  follows_length = True  # the momentum grows until the last step

  def errors(self) -> Iterator[str]:
    if self.temperature <= 0:
      yield (
        f"config.objective.temperature: got {self.temperature}, expected a"
        " number above 0."
      )

  def views(self, ops):
    return {"views": View(ops, count=2)}  # [b, 2, h, w, c]

  def network(self, model):
    from vit_jax.models import build

    return build(model, 0)

  def make(self, model, run_shape, models):
    import jax
    import jax.numpy as jnp

    network = self.network(model)

    def vectors(params, images, **options):
      _, out = network.apply({"params": params}, normalise(images), **options)
      x = out["pre_logits"].astype(jnp.float32)
      return x / jnp.linalg.norm(x, axis=-1, keepdims=True).clip(1e-6)

    def targets(teacher, batch, rng, step, memory, over):
      keys = [vectors(teacher, batch["views"][:, i]) for i in (1, 0)]
      places = over.rows(len(keys[0]))
      return Targets({"place": places}, [over.gather(k) for k in keys])

    def loss(params, batch, rng, step):
      mask = batch["mask"].astype(jnp.float32)
      place = batch["targets"]["place"][:, None]
      total = right = 0.0
      for i, keys in enumerate(batch["shared"]):
        queries = vectors(
          params,
          batch["views"][:, i],
          is_training=True,
          records=batch["index"],
          rngs={"dropout": jax.random.fold_in(rng, i)},
        )
        log_p = jax.nn.log_softmax(queries @ keys.T / self.temperature)
        total -= jnp.sum(jnp.take_along_axis(log_p, place, 1)[:, 0] * mask)
        right += jnp.sum((log_p.argmax(1) == place[:, 0]) * mask)
      count = 2 * jnp.sum(mask)
      return total, count, {"accuracy": (right, count)}

    def momentum(step):
      cosine = jnp.cos(jnp.pi * step / run_shape.total_steps)
      return 1 - (1 - self.momentum) * (1 + cosine) / 2

    flops = model.train_flops(run_shape.image_size, 0)
    return Learner(
      network,
      loss,
      teacher=Average(momentum),
      targets=targets,
      train_flops=2 * flops + 2 * flops / 3,  # two views, teacher forward only
    )

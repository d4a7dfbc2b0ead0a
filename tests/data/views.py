"""Records and an objective with two views, for tests."""

import dataclasses
import functools
import io

import numpy as np
from numbered import Numbers
from PIL import Image

from vit_jax.batch import View, normalise
from vit_jax.data.tf_cpu import tf
from vit_jax.objectives import Objective

GLOBAL = "decode_inception_crop(32, 25)|flip_lr"
LOCAL = "decode_inception_crop(16, 5, 25)|flip_lr"
VIEWS = {"global_crops": View(GLOBAL, 2), "local": View(LOCAL, 3)}
SHAPES = {"global_crops": (2, 32, 32, 3), "local": (3, 16, 16, 3)}


@functools.cache
def files(count=40) -> tuple[bytes, ...]:
  """Encoded images, every other one a JPEG; two are broken."""
  rng = np.random.default_rng(0)

  def made(number):
    noise = rng.integers(0, 256, (9, 7, 3), np.uint8)
    image = Image.fromarray(noise).resize((60 + number, 50))
    file = io.BytesIO()
    image.save(file, "jpeg" if number % 2 else "png")
    return file.getvalue()

  made = [made(i) for i in range(count)]
  made[7], made[12] = made[7][:200], b"no image"
  return tuple(made)


class Files(Numbers):
  """Records of `files`."""

  def load(self, raw):
    with tf.init_scope():
      data = tf.constant(files())
    return {**super().load(raw), "image": tf.gather(data, raw["index"])}


@dataclasses.dataclass(frozen=True)
class TwoViews(Objective):
  """Class of the mean of the logits of all crops."""

  kind: str = "two_views"

  trains_head = False

  def views(self, ops):
    return VIEWS

  def make(self, model, run_shape):
    import jax
    import jax.numpy as jnp

    from vit_jax.losses import softmax_xent
    from vit_jax.models import build

    module = build(model, run_shape.num_classes)

    def loss_fn(params, batch, rng):
      def logits_of(name, side):
        crops = batch[name]
        images = crops.reshape(-1, *crops.shape[2:])
        images = jax.image.resize(
          normalise(images), (len(images), side, side, 3), "nearest"
        )
        logits, _ = module.apply({"params": params}, images)
        return logits.reshape(*crops.shape[:2], -1).mean(1)

      logits = logits_of("global_crops", 16) + logits_of("local", 16)
      labels = jax.nn.one_hot(batch["label"], logits.shape[-1])
      mask = batch["mask"].astype(jnp.float32)
      return jnp.sum(softmax_xent(logits, labels) * mask), jnp.sum(mask), {}

    return module, loss_fn

"""An image operation: a random contrast."""

import dataclasses

from vit_jax.data.operation import Operation


@dataclasses.dataclass(frozen=True)
class Fade(Operation):
  """Multiplies the contrast by a random number from `least` to 1."""

  least: float = 0.5

  def __post_init__(self):
    if not 0 <= self.least <= 1:
      raise ValueError(f"got least={self.least}, expected 0 to 1")

  def tensorflow(self, image, key):
    import tensorflow as tf

    factor = tf.random.stateless_uniform((), key, self.least, 1.0)
    faded = 128.0 + factor * (tf.cast(image, tf.float32) - 128.0)
    return tf.cast(tf.round(faded), tf.uint8)

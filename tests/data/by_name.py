"""One image operation in TensorFlow by its name, and what it is run on."""

import numpy as np

from vit_jax.data.operations import OPERATIONS
from vit_jax.data.tf_cpu import tf


def run(name, image, key, *args, **kwargs):
  return OPERATIONS[name](*args, **kwargs).tensorflow(image, key)


def keys(num, seed=7):
  return [tf.constant([seed, i], tf.int64) for i in range(num)]


def noise(height, width, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3), np.uint8)

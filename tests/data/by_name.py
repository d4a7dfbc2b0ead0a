"""One image operation in TensorFlow, by its name."""

from vit_jax.data.operations import OPERATIONS


def run(name, image, key, *args, **kwargs):
  return OPERATIONS[name](*args, **kwargs).tensorflow(image, key)

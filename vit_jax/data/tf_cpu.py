"""TensorFlow on the CPU alone: the accelerators are for jax.

Import `tf` from here, never from `tensorflow`: the devices must be hidden
before TensorFlow does anything else in the process.
"""

import importlib.util
import os
import sys
import warnings


def _tensorflow():
  """Imports TensorFlow without Keras, which is imported on first use.

  By itself TensorFlow imports an installed Keras, and with it scikit-learn and
  Matplotlib: 1.6 of 4.0 s.
  """
  keras = importlib.util.find_spec("keras")
  if keras is None or {"keras", "tensorflow"} & sys.modules.keys():
    return importlib.import_module("tensorflow")
  sys.modules["keras"] = None  # as if it were not installed
  try:
    module = importlib.import_module("tensorflow")
  finally:
    del sys.modules["keras"]
  # `import tensorflow.keras` looks for it here.
  of_keras = os.path.join(os.path.dirname(keras.origin), "_tf_keras")
  module.__path__ = [of_keras, *filter(None, module.__path__)]
  return module


try:
  tf = _tensorflow()
except ModuleNotFoundError as e:
  raise ModuleNotFoundError(
    f"got no {e.name}, expected it for training and scoring:"
    " install vit_jax with its extra 'train' (README.md, Install).",
    name=e.name,
  ) from None

for _kind in ("GPU", "TPU"):
  try:
    tf.config.set_visible_devices([], _kind)
  except RuntimeError:
    # Too late: the program used TensorFlow before it imported this package.
    if tf.config.list_logical_devices(_kind):
      warnings.warn(
        f"TensorFlow has the {_kind}s already; import vit_jax.data before it.",
        stacklevel=2,
      )

# Functions of data sets are traced as they are. None has Python control flow
# that would need conversion to TensorFlow's, and the attempt takes time.
as_is = tf.autograph.experimental.do_not_convert


def as_bytes(data) -> bytes:
  """Returns the bytes that `tf.numpy_function` passes, in a graph or not."""
  return data if isinstance(data, bytes) else data.item()


__all__ = ["as_bytes", "as_is", "tf"]

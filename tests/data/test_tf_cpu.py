"""TensorFlow starts without Keras, which is there for who asks for it."""

import pathlib
import subprocess
import sys

import pytest

CODE = """
import sys
from vit_jax.data.tf_cpu import tf
slow = {"keras", "sklearn", "matplotlib"} & sys.modules.keys()
assert not slow, slow
from tensorflow.keras.layers import Dense
import tensorflow.keras.optimizers
assert tf.keras.layers.Dense is Dense and "keras" in sys.modules
"""


@pytest.mark.nightly
def test_keras_is_imported_when_it_is_used():
  done = subprocess.run(
    [sys.executable, "-c", CODE],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr

"""Operations of one's own, by import path."""

import dataclasses

import numpy as np
import pytest
import tiny
from numbered import global_batches, numbers

from vit_jax.config import checks, freeze, to_dict
from vit_jax.data import ops, pixels
from vit_jax.data.operation import Operation
from vit_jax.data.preprocessing import image_size
from vit_jax.data.tf_cpu import tf


@dataclasses.dataclass(frozen=True)
class Darken(Operation):
  """Not random."""

  levels: int = 10

  def __post_init__(self):
    if self.levels < 0:
      raise ValueError("levels is negative")

  def tensorflow(self, image, key):
    return image - tf.minimum(image, tf.cast(self.levels, tf.uint8))

  def numpy(self, image):
    return image - np.minimum(image, np.uint8(self.levels))


@dataclasses.dataclass(frozen=True)
class Beside(Operation):
  """Puts the image, or black, to its right."""

  share: float

  def shape(self, shape):
    if shape is None:
      raise ValueError("got images of differing size")
    return shape[0], 2 * shape[1]

  def tensorflow(self, image, key):
    is_black = tf.random.stateless_uniform([], key) < self.share
    other = tf.where(is_black, tf.zeros_like(image), image)
    return tf.concat([image, other], 1)


class Floats(Darken):
  def tensorflow(self, image, key):
    return tf.cast(image, tf.float32)


HERE = __name__


def test_a_random_one_has_a_key_for_each_record_and_epoch():
  views = f"decode|pad(2)|random_crop(8)|{HERE}:Beside(share=0.5)"
  assert image_size(views) == (8, 16)
  config = tiny.config(data__ops=views)
  assert freeze(to_dict(config)) == config
  whole = []
  for batch in global_batches(numbers(16), 2, ops=views):
    images = batch["image"][np.argsort(batch["index"])]
    assert images.shape == (16, 8, 16, 3)
    whole.append(~images[:, :, 8:].any((1, 2, 3)))
  assert 1 < whole[0].sum() < 15 and (whole[0] != whole[1]).any()
  with pytest.raises(ValueError, match="Beside, which is random"):
    pixels.apply(np.zeros((9, 7, 3), np.uint8), views)


def test_one_with_numpy_is_for_predict_too():
  image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
  text = f"decode|{HERE}:Darken(200)|resize(8)"
  key = tf.zeros([2], tf.int64)
  expected = ops.apply(tf.constant(image), text, key).numpy()
  np.testing.assert_array_equal(pixels.apply(image, text), expected)


@pytest.mark.parametrize(
  "op, words",
  [
    ("my_lab.ops:Fade", "no module 'my_lab'"),
    (f"{HERE}:Fade", "has no Fade"),
    (f"{HERE}:np", "subclass of"),
    (f"{HERE}:Darken('a')", "levels of"),
    (f"{HERE}:Darken(-1)", "levels is negative"),
    (f"{HERE}:Beside", "missing a required argument: 'share'"),
  ],
)
def test_errors(op, words):
  (error,) = checks.errors(tiny.config(data__ops=f"decode|resize(16)|{op}"))
  assert error.startswith("config.data.ops: ") and words in error


def test_a_wrong_size_or_type_is_refused():
  errors = checks.errors(tiny.config(data__ops=f"decode|{HERE}:Beside(0.5)"))
  assert "got images of differing size" in errors[0]
  with pytest.raises(ValueError, match="Floats: got image float32"):
    global_batches(numbers(9), 1, ops=f"decode|resize(8)|{HERE}:Floats")

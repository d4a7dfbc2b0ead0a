"""Operations of one's own, by import path."""

import dataclasses

import numpy as np
import pytest
import tiny
from numbered import global_batches, numbers

from vit_jax.config import checks, freeze, to_dict
from vit_jax.data import ops, pixels
from vit_jax.data.operation import Operation
from vit_jax.data.preprocessing import image_size, parse_ops
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
class Twice(Operation):
  """Random, and of another size."""

  axis: int
  share: float = 0.5

  def shape(self, shape):
    if shape is None:
      raise ValueError("got images of differing size")
    return shape[0] * (1 + (self.axis == 0)), shape[1] * (1 + (self.axis == 1))

  def tensorflow(self, image, key):
    is_black = tf.random.stateless_uniform([], key) < self.share
    other = tf.where(is_black, tf.zeros_like(image), image)
    return tf.concat([image, other], self.axis)


class Floats(Darken):
  def tensorflow(self, image, key):
    return tf.cast(image, tf.float32)


HERE = __name__
TEXT = f"decode|{HERE}:Darken|{HERE}:Twice(0, share=0.25)|flip_lr"


def test_language_and_metadata():
  assert [op.name for op in parse_ops(TEXT)][1] == f"{HERE}:Darken"
  assert parse_ops(TEXT)[2].arguments == {"axis": 0, "share": 0.25}
  text = TEXT.replace("|", "|resize((8, 6))|", 1)
  assert image_size(text) == (16, 6)
  config = tiny.config(data__ops=text)
  assert freeze(to_dict(config)) == config


def test_keys_differ_between_records_and_epochs():
  views = f"decode|pad(2)|random_crop(8)|{HERE}:Twice(1)"
  first, second = global_batches(numbers(16), 2, ops=views)
  assert first["image"].shape == (16, 8, 16, 3)
  whole = [b["image"][np.argsort(b["index"])] for b in (first, second)]
  is_black = [~images[:, :, 8:].any((1, 2, 3)) for images in whole]
  assert 1 < is_black[0].sum() < 15 and (is_black[0] != is_black[1]).any()


def test_numpy_for_predict():
  image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
  text = f"decode|{HERE}:Darken(200)|resize(8)"
  got = pixels.apply(image, text)
  key = tf.zeros([2], tf.int64)
  expected = ops.apply(tf.constant(image), text, key).numpy()
  np.testing.assert_array_equal(got, expected)
  assert not pixels.is_random(text) and pixels.is_random(TEXT)
  with pytest.raises(ValueError, match="Twice, which is random"):
    pixels.apply(image, f"decode|resize(8)|{HERE}:Twice(0)")


@pytest.mark.parametrize(
  "op, words",
  [
    ("my_lab.ops:Fade", "no module 'my_lab'"),
    (f"{HERE}:Fade", "has no Fade"),
    (f"{HERE}:np", "subclass of"),
    (f"{HERE}:Darken('a')", "levels of"),
    (f"{HERE}:Darken(-1)", "levels is negative"),
    (f"{HERE}:Twice", "missing a required argument: 'axis'"),
  ],
)
def test_errors(op, words):
  (error,) = checks.errors(tiny.config(data__ops=f"decode|resize(16)|{op}"))
  assert error.startswith("config.data.ops: ") and words in error


def test_a_wrong_size_or_type_is_refused():
  errors = checks.errors(tiny.config(data__ops=f"decode|{HERE}:Twice(0)"))
  assert "got images of differing size" in errors[0]
  with pytest.raises(ValueError, match="Floats: got image float32"):
    global_batches(numbers(9), 1, ops=f"decode|resize(8)|{HERE}:Floats")

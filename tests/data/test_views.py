"""Several crops of a record: decoded once, each with its own random numbers."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny
from kinds import encoded
from numbered import Numbers, global_batches, numbers
from PIL import Image

from vit_jax.batch import View
from vit_jax.config import checks
from vit_jax.data import decoding, order
from vit_jax.data import ops as ops_lib
from vit_jax.data.preprocessing import view_shapes
from vit_jax.data.tf_cpu import tf
from vit_jax.objectives.objective import Objective

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
    return encoded(image, "jpeg" if number % 2 else "png")

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
  """Says what a batch has of a record; it is not trained."""

  kind: str = "two_views"

  trains_head = False

  def views(self, ops):
    return VIEWS


PADDED = {
  "global_crops": View("decode|pad(2)|random_crop(8)|flip_lr", 2),
  "local": View("decode|random_crop(4)"),
}


def config(**changes):
  made = tiny.config(fake_data=True, data__dataset="cifar10", **changes)
  return dataclasses.replace(made, objective=TwoViews())


@pytest.mark.slow
def test_a_record_that_cannot_be_decoded_is_masked_in_all_views():
  batches = global_batches(numbers(40, Files), 3, ops=VIEWS)
  masked = {i for b in batches for i in b["index"][~b["mask"]]}
  assert masked == {7, 12}
  for batch in batches:
    for name in VIEWS:
      assert not batch[name][~batch["mask"]].any()
      assert batch[name][batch["mask"]].any((1, 2, 3, 4)).all()


@pytest.mark.slow
def test_an_image_smaller_than_the_crop_is_named():
  ops = "decode|central_crop(75)"
  with pytest.raises(ValueError, match=r"'n'.*CentralCrop.*\(75, 75\)"):
    global_batches(numbers(40, Files), 1, ops=ops)


def test_each_crop_follows_from_seed_epoch_record_and_its_number():
  """Every crop is that of its own operations on the whole image."""
  source = numbers(7, Files)  # none of them broken
  (batch,) = global_batches(source, 1, seed=3, ops=VIEWS)  # three epochs
  shapes = {k: v.shape[1:] for k, v in batch.items()}
  assert shapes == SHAPES | {"label": (), "mask": (), "index": ()}
  assert view_shapes(VIEWS, 3) == SHAPES
  for row in (0, 14):
    index, epoch = batch["index"][row], row // 7
    image = source.load({"index": tf.constant(index)})["image"]
    image = ops_lib.apply(image, "decode", tf.zeros([2], tf.int64))
    crops = [crop for name in VIEWS for crop in batch[name][row]]
    texts = [view.ops for view in VIEWS.values() for _ in range(view.count)]
    for number, (ops, crop) in enumerate(zip(texts, crops, strict=True)):
      key = tf.constant([order.root(3) + epoch, index + 2**40 * number])
      np.testing.assert_array_equal(ops_lib.apply(image, ops, key), crop)


def rows(source, views, count):
  """The views of the first records, without a pipeline."""
  fast, _ = decoding.row_fns(source, views, root=5)
  zero = tf.constant(0, tf.int64)
  made = [
    fast({"raw": {"index": zero + i}, "epoch": zero}) for i in range(count)
  ]
  return {k: np.stack([row[k] for row in made]) for k in views}


def test_the_first_crop_is_that_of_one_view():
  view = PADDED["global_crops"]
  one = rows(numbers(9), {"image": View(view.ops)}, 9)["image"]
  two = rows(numbers(9), PADDED, 9)["global_crops"]
  np.testing.assert_array_equal(one, two[:, 0])
  assert (one != two[:, 1]).any((1, 2, 3)).mean() > 0.5


@pytest.mark.slow
def test_a_view_like_another_has_its_crops():
  """At another size, in any order; other views keep their random numbers."""
  ops = "decode|random_resized_crop({}, 0.2, 0.5)|flip_lr|random_grey(0.3)"
  small, large = View(ops.format(8), 2), View(ops.format(16), 2, like="small")
  other = View("decode|random_crop(8)|flip_lr", 2)
  source = numbers(40, Files)
  alone = rows(source, {"other": other, "small": small}, 4)
  batch = rows(source, {"other": other, "large": large, "small": small}, 4)
  for name in ("small", "other"):
    np.testing.assert_array_equal(batch[name], alone[name])
  halves = batch["large"].reshape(-1, 2, 8, 2, 8, 2, 3).mean((3, 5))
  # Two filters are up to 4 levels apart, two crops of an image 20 and more.
  assert np.abs(halves - batch["small"]).mean((2, 3, 4)).max() < 5
  assert np.abs(halves[:, ::-1] - batch["small"]).mean((2, 3, 4)).min() > 5


RESIZED = View("decode|resize(8)")
CROP = "decode|random_resized_crop({}, {}, 1)"


@pytest.mark.parametrize(
  "views, words",
  [
    ({}, ["no view"]),
    ({"local": View("decode")}, ["'local'", "one size"]),
    ({"label": RESIZED}, ["'label'", "an identifier other"]),
    ({"a": View("decode|resize(8)", 0)}, ["'a'", "count=0"]),
    (
      {"a": View("decode(exif=False)|resize(8)"), "b": RESIZED},
      ["decode differently", "exif=False"],
    ),
    (
      {"a": RESIZED, "b": View("decode|resize(9)", like="c")},
      ["'b'", "expected one of a"],
    ),
    (
      {"a": RESIZED, "b": View("decode|resize(9)", 3, like="a")},
      ["'b'", "count=3"],
    ),
    (
      {
        "a": View(CROP.format(8, 0.2)),
        "b": View(CROP.format(9, 0.3), like="a"),
      },
      ["'b'", "same arguments"],
    ),
  ],
)
def test_wrong_views_are_errors_of_the_config(views, words, monkeypatch):
  monkeypatch.setattr(TwoViews, "views", lambda self, ops: views)
  errors = [e for e in checks.errors(config()) if "config.objective" in e]
  assert len(errors) == 1 and "two_views" in errors[0]
  assert all(word in errors[0] for word in words)
  with pytest.raises(ValueError, match=words[0]):
    global_batches(numbers(9), 1, ops=views)


def test_decoding_options_of_the_config_reach_the_views():
  views = config(data__background="white").views.values()
  assert all("background='white'" in view.ops for view in views)

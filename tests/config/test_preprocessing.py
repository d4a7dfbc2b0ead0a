"""The language of preprocessing."""

import pytest

from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.data.preprocessing import (
  Op,
  image_size,
  parse_ops,
  turns_upright,
)
from vit_jax.weights import eval_preprocessing


def test_parses_names_arguments_and_keywords():
  assert parse_ops("decode| resize((32, 48), method='area') |flip_lr") == (
    Op("decode", (), {}),
    Op("resize", ((32, 48),), {"method": "area"}),
    Op("flip_lr", (), {}),
  )


@pytest.mark.parametrize(
  "text, size",
  [
    ("decode|inception_crop(224)|flip_lr", (224, 224)),
    ("decode_inception_crop((96, 64), 20, 80)", (96, 64)),
    ("decode|resize_small(256)|central_crop(224)", (224, 224)),
    ("decode|resize((32, 48))|pad(2)", (36, 52)),
    ("decode|resize(32)|pad(4)|random_crop(32)", (32, 32)),
    ("decode|resize(8)|pad(7, 'reflect')", (22, 22)),
    ("decode_inception_crop(224)|flip_lr|randaug(2, 15)", (224, 224)),
  ],
)
def test_image_size(text, size):
  assert image_size(text) == size


@pytest.mark.parametrize(
  "text, message",
  [
    ("decode|inceptoin_crop(3)", "Did you mean 'inception_crop'?"),
    ("resize(3)", "decode or decode_inception_crop at the start"),
    (
      "decode|resize(1, 2, 3, 4)",
      "positional arguments of resize(size: ",
    ),
    ("decode|resize(8, method='cubic')", "Did you mean 'bicubic'?"),
    ("decode|resize(-3)", "expected pixels such as 224 or (height, width)"),
    ("decode|resize(8)|random_crop(9)", "expected at most the (8, 8) pixels"),
    ("decode|resize_small(256)", "expected images of one size at the end"),
    ("decode|inception_crop(8, 0)", "0 < area_min <= area_max <= 100"),
    ("decode|resize(8)|pad(-1)", "expected the pixels to add on each side"),
    ("decode|resize((9, 8))|pad(8, 'reflect')", "less than the sides (9, 8)"),
    ("decode|resize_small((9, 8))|resize(8)", "pixels of the shorter side"),
    ("decode|resize_small_torch(0)|resize(8)", "pixels of the shorter side"),
    ("decode|resize(x)", "expected the form 'decode|"),
    ("decode(background='no')|resize(8)", "background: got 'no', expected a c"),
    ("decode(max_pixels=0)|resize(8)", "max_pixels: got 0, expected 1 or more"),
    ("decode|inception_crop(8, 'a')", "in 'inception_crop'"),
    (
      "decode|randaug(2, 9)|resize(8)",
      "size of images: got None, expected one size",
    ),
    ("decode|resize(8)|randaug(0, 9)", "num_layers: got 0, expected 1 or more"),
    ("decode|resize(8)|randaug(2, 21)", "magnitude: got 21, expected a whole"),
  ],
)
def test_errors(text, message):
  with pytest.raises(ValueError) as e:
    image_size(text)
  assert message in str(e.value)


def test_published_pixels_are_taken_as_stored():
  stored = eval_preprocessing.as_stored
  assert stored("decode|resize(8)") == "decode(exif=False)|resize(8)"
  accurate = "decode(dct='accurate')|resize_torch(8)"
  assert (
    stored(accurate) == "decode(dct='accurate', exif=False)|resize_torch(8)"
  )
  assert stored(stored(accurate)) == stored(accurate)
  assert not turns_upright(stored(accurate)) and turns_upright(accurate)
  assert eval_preprocessing.taken_apart(stored(accurate)).ops == accurate
  assert stored("decode_inception_crop(8)") == "decode_inception_crop(8)"
  with pytest.raises(ValueError, match="exif"):
    image_size("decode(exif='no')|resize(8)")


def test_what_a_run_says_of_decoding_is_in_all_its_operations():
  c = defaults()
  c.data.background, c.data.max_pixels = "white", 10**9
  c.evals = {
    "val": {"kind": "classification", "ops": "decode(exif=False)|resize(8)"},
    "probe": {"kind": "linear", "train_ops": "decode|resize(8)|flip_lr"},
  }
  config = freeze(c)
  assert config.data.ops == (
    "decode_inception_crop(224, background='white', max_pixels=1000000000)"
    "|flip_lr"
  )
  assert config.evals[0].ops == (
    "decode(exif=False, background='white', max_pixels=1000000000)|resize(8)"
  )
  assert config.evals[1].train_ops == (
    "decode(background='white', max_pixels=1000000000)|resize(8)|flip_lr"
  )
  # A run that goes on reads them from its config.json.
  assert freeze(to_dict(config)) == config
  c.data.background = "whiet"
  with pytest.raises(ConfigError, match="config.data.background: got 'whiet'"):
    freeze(c)


def test_operations_that_do_not_decode_stay_for_the_check_of_all_options():
  c = defaults()
  c.data.ops, c.data.background = "resize(8)", "white"
  assert freeze(c).data.ops == "resize(8)"

"""The language of preprocessing."""

import pytest

from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.data.preprocessing import Op, image_size, parse_ops, turns_upright
from vit_jax.weights import eval_preprocessing


def test_parses_names_arguments_and_keywords():
  assert parse_ops("decode| resize((32, 48), method='area') |flip_lr") == (
    Op("decode", (), {}),
    Op("resize", ((32, 48),), {"method": "area"}),
    Op("flip_lr", (), {}),
  )


def test_image_size():
  for text, size in {
    "decode_inception_crop((96, 64), 20, 80)": (96, 64),
    "decode|resize_small(256)|central_crop(224)": (224, 224),
    "decode|resize((32, 48))|pad(2)": (36, 52),
    "decode|resize(32)|pad(4)|random_crop(32)": (32, 32),
  }.items():
    assert image_size(text) == size


# Operations, and what the error names.
WRONG = [
  ("decode|inceptoin_crop(3)", "'inception_crop'"),
  ("resize(3)", "decode or decode_inception_crop at the start"),
  ("decode|resize(1, 2, 3, 4)", "resize(size: "),
  ("decode|resize(-3)", "224 or (height, width)"),
  ("decode|resize_small(256)", "one size"),
  ("decode|inception_crop(8, 0)", "0 < area_min <= area_max <= 100"),
  ("decode|resize_small((9, 8))|resize(8)", "shorter side"),
  ("decode|resize(x)", "expected the form"),
  ("decode(background='no')|resize(8)", "background: got 'no'"),
  ("decode(exif='no')|resize(8)", "exif"),
  ("decode|randaug(2, 9)|resize(8)", "one size"),
  ("decode|resize(8)|randaug(2, 21)", "magnitude: got 21"),
  ("decode|resize(16)|random_resized_crop(8, 0.5, 0.2)", "scale_min"),
  ("decode|resize(16)|jitter(-0.1, 0, 0, 0, 1)", "brightness"),
  ("decode|resize(16)|jitter(0, 0, 0, 0.6, 1)", "hue"),
  ("decode|resize(16)|gaussian_blur(2)", "p: got"),
  ("decode|resize(16)|gaussian_blur(1, 8)", "kernel"),
  ("decode|resize(16)|solarize(0.2, 300)", "threshold"),
]


@pytest.mark.parametrize("text, word", WRONG)
def test_operations_that_are_wrong(text, word):
  with pytest.raises(ValueError) as e:
    image_size(text)
  assert word in str(e.value)


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


def test_what_a_run_says_of_decoding_is_in_all_its_operations():
  c = defaults()
  c.data.background, c.data.max_pixels = "white", 10**9
  c.evals = {
    "val": {"kind": "classification", "ops": "decode(exif=False)|resize(8)"},
    "probe": {"kind": "linear", "train_ops": "decode|resize(8)|flip_lr"},
  }
  config = freeze(c)
  said = "background='white', max_pixels=1000000000"
  assert config.data.ops == f"decode_inception_crop(224, {said})|flip_lr"
  assert config.evals[0].ops == f"decode(exif=False, {said})|resize(8)"
  assert config.evals[1].train_ops == f"decode({said})|resize(8)|flip_lr"
  # A run that goes on reads them from its config.json.
  assert freeze(to_dict(config)) == config
  c.data.background = "whiet"
  with pytest.raises(ConfigError, match="config.data.background: got 'whiet'"):
    freeze(c)

"""The frame of the report: images with names, which are escaped."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from vit_jax.tools.reporting import page


def _pictures(html):
  links = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', html)
  return [(k, Image.open(io.BytesIO(base64.b64decode(v)))) for k, v in links]


def test_small_images_are_kept_to_the_bit_and_photographs_are_jpeg():
  small = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
  large = np.full((224, 320, 3), 200, np.uint8)
  cards = page.cards([(image, "a", "a", 1.0) for image in (small, large)])
  (png, exact), (jpeg, near) = _pictures(cards)
  assert (png, jpeg) == ("png", "jpeg")
  np.testing.assert_array_equal(exact, small)
  np.testing.assert_allclose(np.asarray(near, int), large, atol=2)


@pytest.mark.parametrize(
  ("label", "guess", "shown"),
  [
    ("<b>", "<b>", ["<b><bdi>&lt;b&gt;</bdi></b>"]),
    ("ש", "Σ", ["✗ <b><bdi>Σ</bdi></b>", "true: <bdi>ש</bdi>"]),
    ("x_y", "a", ["true: <bdi>x_<wbr>y</bdi>"]),
  ],
)
def test_cards_name_the_errors(label, guess, shown):
  text = page.cards([(np.zeros((4, 4, 3), np.uint8), label, guess, 0.754)])
  assert all(part in text for part in [*shown, "75%"])
  assert ("true: " in text) == ("wrong" in text) == (label != guess)

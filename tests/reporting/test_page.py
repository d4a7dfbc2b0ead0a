"""The frame of the report: images with names, and where lines may end."""

import base64
import doctest
import io
import re

import numpy as np
import pytest
from PIL import Image

from vit_jax.reporting import page


def test_examples():
  assert doctest.testmod(page).failed == 0


def _pictures(html):
  links = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', html)
  return [(k, Image.open(io.BytesIO(base64.b64decode(v)))) for k, v in links]


def test_what_is_missing_is_one_sentence():
  for what in ("a.b: got 1.; c.", "a.b: got 1; c"):
    assert ">Left out: a.b: got 1; c.</p>" in page.missing(what)
  assert page.missing("") == ""


def test_small_images_are_kept_to_the_bit():
  image = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
  ((kind, picture),) = _pictures(page.cards([(image, "a", "a", 1.0)]))
  assert kind == "png"
  np.testing.assert_array_equal(np.asarray(picture), image)


def test_photographs_are_jpeg():
  image = np.full((224, 320, 3), 200, np.uint8)
  ((kind, picture),) = _pictures(page.cards([(image, "a", "a", 1.0)]))
  assert kind == "jpeg" and picture.size == (320, 224)
  np.testing.assert_allclose(np.asarray(picture, int), 200, atol=2)


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


def test_cards_are_as_wide_as_the_longest_word():
  image = np.zeros((4, 4, 3), np.uint8)
  names = ["a b", "golden_retriever_of_mine", "German short-haired pointer"]
  text = page.cards([(image, name, "x", 0.5) for name in names])
  longest = len("retriever_")
  assert f"--card: {longest + 1}ch" in text


def test_no_style_breaks_words():
  style = page.page("", "")
  assert "overflow-wrap" not in style and "word-break" not in style
  assert "hyphens" not in style and "overflow: hidden" not in style


def test_both_schemes_and_paper():
  text = page.page("", page.picture(b"light", b"dark", 'a "b"'))
  for kind in ("light", "dark"):
    data = base64.b64encode(kind.encode()).decode()
    alt = "a &quot;b&quot;"
    assert (
      f'<img class="{kind}" alt="{alt}" src="data:image/svg+xml;base64,{data}">'
    ) in text
  # Without a query: the light one. On screens that want it: the dark one.
  before, _, after = text.partition(
    "@media screen and (prefers-color-scheme: dark) {\n  img.light"
  )
  assert "img.dark { display: none; }" in before
  assert after.startswith(" { display: none; }\n  img.dark { display: block; }")
  queries = re.findall(r"@media[^{]*color-scheme[^{]*", text)
  assert len(queries) == 2 and all("screen and" in q for q in queries)

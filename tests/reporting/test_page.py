"""The frame of the report: images with names, and where lines may end."""

import base64
import doctest
import io
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from vit_jax.reporting import page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


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


def test_no_style_breaks_words_that_fit():
  style = page.page("", "")
  assert style.count("overflow-wrap: anywhere") == 1  # what does not fit
  assert ".facts td { min-width: 110px; overflow-wrap: break-word; }" in style
  assert "word-break" not in style and "hyphens" not in style
  assert "overflow: hidden" not in style


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1100])
def test_a_long_name_does_not_widen_the_page(tmp_path, width):
  name = "a" * 200
  body = f"<h1>{name}</h1>{page.states([(name, 'finished', name, name)])}"
  body += page.table("facts", ["", name], [[name, "1,234,567"]])
  body += page.table("numbers", ["", "top-1", "top-5"], [[name, "1%", "2%"]])
  (tmp_path / "page.html").write_text(page.page(name, body))
  # A window has a least width, a frame has none.
  (tmp_path / "frame.html").write_text(
    f'<iframe src="page.html" style="width: {width}px; border: 0"></iframe>'
    "<script>onload = () => { const of = frames[0].document; document.title ="
    " [of.documentElement, ...of.querySelectorAll('.wide')].map("
    " (e) => e.scrollWidth - e.clientWidth).join(' '); }</script>"
  )
  command = [BROWSER, "--headless", "--no-sandbox", "--dump-dom"]
  command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path}"]
  done = subprocess.run(
    [*command, f"file://{tmp_path}/frame.html"], capture_output=True, text=True
  )
  assert "<title>0 0 0</title>" in done.stdout, done.stdout[-500:]


def test_paper_is_light():
  """Dark colours are for screens, so a dark browser prints black on white."""
  text = page.page("", "")
  (query,) = re.findall(r"@media[^{]*color-scheme[^{]*", text)
  assert query == "@media screen and (prefers-color-scheme: dark) "

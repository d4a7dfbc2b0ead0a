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

from vit_jax.tools.reporting import page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_examples():
  assert doctest.testmod(page).failed == 0


def _pictures(html):
  links = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', html)
  return [(k, Image.open(io.BytesIO(base64.b64decode(v)))) for k, v in links]


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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_long_name_does_not_widen_the_page_of_a_telephone(tmp_path):
  name = "a" * 200
  body = f"<h1>{name}</h1>{page.states([(name, 'finished', name, name)])}"
  body += page.table("facts", ["", name], [[name, "1,234,567"]])
  body += page.table("numbers", ["", "top-1", "top-5"], [[name, "1%", "2%"]])
  (tmp_path / "page.html").write_text(page.page(name, body))
  # A window has a least width, a frame has none.
  (tmp_path / "frame.html").write_text(
    '<iframe src="page.html" style="width: 390px; border: 0"></iframe>'
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

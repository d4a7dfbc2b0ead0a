"""Charts draw what they are given, models what they have; images have names."""

import base64
import dataclasses
import functools
import io
import pathlib
import re
import warnings
import xml.etree.ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.models.filters import Components
from vit_jax.models.inspection import Survey
from vit_jax.tools.reporting import charts, model_figures, page
from vit_jax.tools.reporting.charts import Line

DATA = pathlib.Path(__file__).parents[1] / "data"
RNG = np.random.default_rng(0)


def _texts(figure):
  return {t.get_text() for t in figure.findobj(mpl.text.Text)}


def _arrays(figure):
  return [np.asarray(i.get_array()) for a in figure.axes for i in a.images]


def _is_drawn(draw, *args):
  svg = charts.render(functools.partial(draw, *args))
  tag = xml.etree.ElementTree.fromstring(svg).tag
  return tag == "{http://www.w3.org/2000/svg}svg"


def test_a_legend_names_the_lines():
  """Names of any script: matplotlib would warn of what the font lacks."""
  lines = [Line("実験 $", [1, 9], [0.5, 0.75]), Line("b", [1], [0.5])]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert _is_drawn(charts.accuracy, lines, 0.1)
  texts = _texts(charts.accuracy(lines, chance=0.1))
  assert {"実験 $ 75.0%", "b 50.0%", "chance 10.0%"} <= texts


@pytest.mark.parametrize("count", [10, 500])
def test_what_is_not_finite_is_a_gap_with_crosses(count):
  y = np.linspace(2.0, 1.0, count)
  y[[count // 2, -1]] = np.nan
  figure = charts.loss([Line("a", range(count), y)], x_end=2 * count)
  *_, curve, crosses = figure.axes[0].lines
  assert np.isnan(curve.get_ydata()).tolist() == np.isnan(y).tolist()
  assert 1 <= np.nanmin(curve.get_ydata()) < np.nanmax(curve.get_ydata()) <= 2
  assert crosses.get_xdata().tolist() == [count // 2, count - 1]
  assert figure.axes[0].get_xlim() == (0, 2 * count * 1.02)
  assert "a not finite" in _texts(figure)


def test_the_page_colours_a_chart():
  """None stays as it is on a dark page; the same chart is the same file."""
  draw = functools.partial(charts.loss, [Line("a", [1, 2], [1.0, 0.5])])
  svg = charts.render(draw)
  assert svg == charts.render(draw)
  html = page.chart(svg, 'a "b"')
  used = {"paper", "ink", "soft", "line", "curve-1"}
  assert {*re.findall(r"var\(--([\w-]+)\)", html)} == used
  assert all(page.COLOURS[name] in svg for name in used)
  assert not re.search(r": #[0-9a-f]{3,8}\b", html)
  assert html.startswith('<figure><svg role="img" aria-label="a &quot;b&quot;"')


def test_similarity_maps_lie_as_the_patches_do():
  # Orthogonal rows: each map is 1 at its own patch, and 0 elsewhere.
  assert _is_drawn(charts.similarity, np.eye(6), (2, 3), "before $")
  (mosaic,) = _arrays(charts.similarity(np.eye(6), (2, 3), "before"))[:1]
  assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
  first, last = mosaic[:2, :3], mosaic[-2:, -3:]
  np.testing.assert_allclose(first, [[1, 0, 0], [0, 0, 0]])
  np.testing.assert_allclose(last, [[0, 0, 0], [0, 0, 1]])


def test_zero_is_grey_and_the_largest_value_black_or_white():
  images = np.zeros((9, 2, 2, 3), np.float32)
  images[0, 0, 0] = [0.5, -0.25, 0]
  images[8, 1, 1] = [0, 0, -2]
  components = Components(images, np.full(9, 0.1, "f"))
  figure = model_figures.draw_filters(components, "a $")
  assert {"a $", "9 components, 90% of the variance"} <= _texts(figure)
  (picture,) = _arrays(figure)
  assert picture.shape == (2 * 3 - 1, 7 * 3 - 1, 4)
  np.testing.assert_allclose(picture[0, 0], [1, 0.25, 0.5, 1])
  np.testing.assert_allclose(picture[0, 1], [0.5, 0.5, 0.5, 1])
  np.testing.assert_allclose(picture[4, 4], [0.5, 0.5, 0, 1])
  assert picture[0, 2, 3] == 0  # a gap
  assert not picture[3:, 6:, 3].any()  # places without a component


@pytest.mark.parametrize("rows", [2, 16])
def test_batches_do_not_show(monkeypatch, rows):
  """Distances are means over all images; the last batch is filled up."""
  shapes = []

  def survey(config, params, images):
    shapes.append(len(images))
    mean = images.mean((1, 2, 3)) * params["scale"]
    distances = np.tile(mean[:, None], (2, 1, 3))  # two layers, three heads
    return Survey(distances, np.tile(mean[:, None, None], (1, 4, 4)))

  monkeypatch.setattr(model_figures.inspection, "survey", survey)
  monkeypatch.setattr(model_figures.inspection, "batch_size", lambda *_: rows)
  vit = vit_jax.load(DATA / "bv_map.weights.npz", verbose=False)
  images = RNG.integers(0, 256, (5, *vit.image_size, 3), np.uint8)

  def of(scale):
    scaled = dataclasses.replace(vit, params=vit.params | {"scale": scale})
    return model_figures.inspect_model("a", "a", scaled, [*images], ["b"] * 5)

  model, mean = of(2.0), images.mean((1, 2, 3)) / 127.5 - 1
  np.testing.assert_allclose(model.maps[:, 0, 0], 2 * mean, atol=1e-6)
  np.testing.assert_allclose(model.distances, 2 * mean.mean(), atol=1e-6)
  assert len({*shapes}) == 1
  with pytest.raises(ValueError, match="a: .*not a number"):
    of(np.nan)  # of weights that are no numbers


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


def test_cards_name_the_errors():
  image = np.zeros((4, 4, 3), np.uint8)
  right = page.cards([(image, "<b>", "<b>", 0.754)])
  assert "<b><bdi>&lt;b&gt;</bdi></b>" in right and "75%" in right
  assert "true: " not in right and "wrong" not in right
  wrong = page.cards([(image, "ש_y", "Σ", 0.754)])
  assert "✗ <b><bdi>Σ</bdi></b>" in wrong and "wrong" in wrong
  assert "true: <bdi>ש_<wbr>y</bdi>" in wrong

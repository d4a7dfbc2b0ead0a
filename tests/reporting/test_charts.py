"""Charts draw what they are given, in the colours of the page."""

import functools
import re
import warnings
import xml.etree.ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from vit_jax.tools.reporting import charts, page
from vit_jax.tools.reporting.charts import Line


@pytest.fixture(autouse=True)
def every_glyph_is_there():
  """matplotlib warns of a character that the font lacks; `render` must not."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def _texts(figure):
  return [t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text()]


def _is_drawn(draw, *args):
  svg = charts.render(functools.partial(draw, *args))
  tag = xml.etree.ElementTree.fromstring(svg).tag
  return tag == "{http://www.w3.org/2000/svg}svg"


def test_a_legend_names_the_lines():
  lines = [Line("fine_tuned $", [1, 9], [0.5, 0.75]), Line("b", [1], [0.5])]
  assert _is_drawn(charts.accuracy, lines, 0.1)
  figure = charts.accuracy(lines, chance=0.1)
  texts = _texts(figure)
  assert {"fine_tuned $ 75.0%", "b 50.0%", "chance 10.0%"} <= set(texts)


def test_a_name_in_another_script_prints_no_warning():
  assert _is_drawn(charts.throughput, [Line("実験一", [1], [1e-3])])


@pytest.mark.parametrize("count", [10, 500])
def test_what_is_not_finite_is_a_gap_with_crosses(count):
  y = np.linspace(2.0, 1.0, count)
  y[[count // 2, -1]] = np.nan
  line = Line("a", range(count), y)
  assert _is_drawn(charts.loss, [line])
  figure = charts.loss([line], x_end=2 * count)
  *_, curve, crosses = figure.axes[0].lines
  assert np.isnan(curve.get_ydata()).tolist() == np.isnan(y).tolist()
  assert 1 <= np.nanmin(curve.get_ydata()) < np.nanmax(curve.get_ydata()) <= 2
  assert crosses.get_xdata().tolist() == [count // 2, count - 1]
  assert figure.axes[0].get_xlim() == (0, 2 * count * 1.02)
  assert "a not finite" in _texts(figure)


def test_fewshot_shows_the_shots_as_ticks():
  lines = [Line("a", [1, 5, 25], [0.2, 0.4, 0.6])]
  assert _is_drawn(charts.fewshot, lines, "L2 16", 0.9)
  (axes,) = charts.fewshot(lines, "L2 16", 0.9).axes
  assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "5", "25"]
  assert axes.get_ylim() == (0, pytest.approx(90 * 1.08))


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
  figure = charts.similarity(np.eye(6), (2, 3), "before")
  mosaic = figure.axes[0].images[0].get_array().filled(np.nan)
  assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
  first, last = mosaic[:2, :3], mosaic[-2:, -3:]
  np.testing.assert_allclose(first, [[1, 0, 0], [0, 0, 0]])
  np.testing.assert_allclose(last, [[0, 0, 0], [0, 0, 1]])

"""Charts draw what they are given, on light and on dark pages."""

import doctest
import functools
import warnings
import xml.etree.ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from vit_jax.reporting import figures, line_labels, page
from vit_jax.reporting.figures import Line


@pytest.fixture(autouse=True)
def every_glyph_is_there():
  """matplotlib warns of a character that the font lacks; `render` does not."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def _texts(figure):
  return [t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text()]


def _is_drawn(draw, *args):
  files = figures.render(functools.partial(draw, *args))
  tags = [xml.etree.ElementTree.fromstring(file).tag for file in files]
  return tags == ["{http://www.w3.org/2000/svg}svg"] * 2


def test_examples():
  assert doctest.testmod(figures).failed == 0
  assert doctest.testmod(line_labels).failed == 0


def test_lines_are_named_at_their_ends():
  lines = [Line("fine_tuned $", [1, 9], [0.5, 0.75]), Line("b", [1], [0.5])]
  assert _is_drawn(figures.accuracy, lines, 0.1)
  figure = figures.accuracy(lines, chance=0.1)
  texts = _texts(figure)
  assert {"fine_tuned $ 75.0%", "b 50.0%", "chance 10.0%"} <= set(texts)


def test_long_names_stand_below_on_several_lines():
  name = "imagenet2012_" + "x" * 60 + "_seed0"
  lines = [Line(name, [1, 9], [0.5, 0.75]), Line("$_{", [1, 9], [0.5, 0.5])]
  assert _is_drawn(figures.accuracy, lines)
  figure = figures.accuracy(lines)
  (legend,) = figure.legends
  first, second = (t.get_text() for t in legend.get_texts())
  assert first.replace("\n", "") == f"{name} 75.0%" and first.count("\n") == 2
  assert max(map(len, first.split("\n"))) <= 50 and second == "$_{ 50.0%"
  # The whole legend is inside the picture, and so are the axes.
  figure.draw_without_rendering()
  width, height = figure.get_size_inches() * figure.dpi
  for box in (legend.get_window_extent(), figure.axes[0].get_window_extent()):
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
  assert figure.axes[0].get_window_extent().height > 0.4 * height


@pytest.mark.parametrize(
  "draw", [figures.loss, figures.learning_rate, figures.throughput]
)
@pytest.mark.parametrize("count", [1, 500])
def test_curves(draw, count):
  y = np.linspace(1e-3, 0, count)
  assert _is_drawn(draw, [Line("", range(count), y)])


@pytest.mark.parametrize("count", [10, 500])
def test_what_is_not_finite_is_a_gap_with_crosses(count):
  y = np.linspace(2.0, 1.0, count)
  y[[count // 2, -1]] = np.nan
  line = Line("a", range(count), y)
  assert _is_drawn(figures.loss, [line])
  figure = figures.loss([line], x_end=2 * count)
  *_, curve, crosses = figure.axes[0].lines
  assert np.isnan(curve.get_ydata()).tolist() == np.isnan(y).tolist()
  assert 1 <= np.nanmin(curve.get_ydata()) < np.nanmax(curve.get_ydata()) <= 2
  assert crosses.get_xdata().tolist() == [count // 2, count - 1]
  assert figure.axes[0].get_xlim() == (0, 2 * count * 1.02)
  assert "a not finite" in _texts(figure)


def test_fewshot_shows_the_shots_as_ticks():
  lines = [Line("a", [1, 5, 25], [0.2, 0.4, 0.6])]
  assert _is_drawn(figures.fewshot, lines, "L2 16", 0.9)
  (axes,) = figures.fewshot(lines, "L2 16", 0.9).axes
  assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "5", "25"]
  assert axes.get_ylim() == (0, pytest.approx(90 * 1.08))


def test_names_in_other_scripts_print_no_warning():
  """Which would be an error here, see `every_glyph_is_there`."""
  assert _is_drawn(figures.loss, [Line("実験一", [1, 2], [1.0, 0.5])])


def test_the_style_of_the_caller_stays():
  keys = ("font.size", "axes.grid", "lines.linewidth")
  before = [mpl.rcParams[k] for k in keys]
  assert _is_drawn(figures.loss, [Line("", [1, 2], [1.0, 0.5])])
  assert [mpl.rcParams[k] for k in keys] == before


def test_each_page_gets_its_own_colours():
  lines = [Line("a", [1, 2], [1.0, 0.5])]
  draw = functools.partial(figures.loss, lines)
  light, dark = (f.decode() for f in figures.render(draw))
  for mine, other, text in (
    (figures.LIGHT, figures.DARK, light),
    (figures.DARK, figures.LIGHT, dark),
  ):
    for used, unused in zip(mine[:4], other[:4], strict=True):
      assert used in text and unused not in text
    assert mine.lines[0] in text and other.lines[0] not in text
    assert "#000000" not in text  # matplotlib's own ink
  assert figures.render(draw) == figures.render(draw)


@pytest.mark.parametrize("palette", [figures.LIGHT, figures.DARK])
def test_text_is_legible(palette):
  """WCAG 2.2 asks for a contrast of 4.5 between text and what it is on."""

  def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
      v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts
    ]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])

  paper = luminance(palette.paper)
  for colour in (palette.ink, palette.faint, *palette.lines):
    low, high = sorted([paper, luminance(colour)])
    assert (high + 0.05) / (low + 0.05) >= 4.5
  assert len(palette.lines) == figures.MOST_LINES
  style = page.page("", "")
  assert f"--paper: {palette.paper}; --ink: {palette.ink};" in style


def test_similarity_maps_lie_as_the_patches_do():
  # Orthogonal rows: each map is 1 at its own patch, and 0 elsewhere.
  assert _is_drawn(figures.similarity, np.eye(6), (2, 3), "before $")
  figure = figures.similarity(np.eye(6), (2, 3), "before")
  mosaic = figure.axes[0].images[0].get_array().filled(np.nan)
  assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
  first, last = mosaic[:2, :3], mosaic[-2:, -3:]
  np.testing.assert_allclose(first, [[1, 0, 0], [0, 0, 0]])
  np.testing.assert_allclose(last, [[0, 0, 0], [0, 0, 1]])


@pytest.mark.parametrize(
  "grid", [(4, 4), (2, 4), (4, 2), (1, 4), (4, 12), (12, 4)]
)
def test_long_names_leave_the_maps_their_place(grid):
  title = "ft_b16_lr=0.01_wd=0.1_aug=medium1_seed=12345_" * 4
  sizes = []
  for text in ("short", title):
    figure = figures.similarity(np.eye(grid[0] * grid[1]), grid, text)
    figure.draw_without_rendering()  # warns of axes that collapse
    whole, axes = figure.bbox, figure.axes[0]
    above = axes.title.get_window_extent()
    assert above.x1 <= whole.x1 and above.y1 <= whole.y1
    label = axes.child_axes[0].yaxis.label.get_window_extent()
    assert label.y0 >= whole.y0 and label.x1 <= whole.x1
    assert label.y1 <= axes.get_window_extent().y1
    least = axes.child_axes[0].get_yticklabels()[0].get_window_extent()
    assert least.y0 >= whole.y0
    bar = axes.child_axes[0].get_window_extent()
    assert 0.1 < bar.width / figure.dpi < 0.2  # inches
    sizes.append(axes.get_window_extent().size)
  np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.1)
  assert axes.title.get_text().replace("\n", "") == title


def test_similarity_refuses_another_grid():
  with pytest.raises(ValueError, match="got 7 rows, expected 2 x 3 = 6"):
    figures.similarity(np.eye(7), (2, 3), "")


def test_repeated_runs_are_all_drawn():
  curves = [
    figures.Repeated("a", [10, 1000], [[50.0, 70.0], [90.0]]),
    figures.Repeated("b", [10], [[40.0]]),
  ]
  assert _is_drawn(figures.spread, "title", curves, "images", [10, 1000])
  figure = figures.spread("title", curves, "images", [10, 1000])
  assert {"a 90.0%", "b 40.0%", "10", "1,000"} <= set(_texts(figure))
  (axes,) = figure.axes
  of_a, of_b, *marks = axes.lines
  assert list(of_a.get_ydata()) == [60.0, 90.0]
  assert list(of_b.get_ydata()) == [40.0]
  places = {(x, y) for m in marks for x, y in m.get_xydata()}
  assert places == {(10, 50), (10, 70), (1000, 90), (10, 40)}
  low, high = axes.get_ylim()
  assert low <= 38 and 92 <= high <= 100.0001
  none = figures.Repeated("a", [], [])
  assert _is_drawn(figures.spread, "title", [none], "images", [10])

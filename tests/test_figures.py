"""Pictures: that they draw what they are given, whatever the names are."""

import doctest
import warnings

import matplotlib as mpl
import numpy as np
import pytest

from vit_jax import figures
from vit_jax.figures import Line


@pytest.fixture(autouse=True)
def every_glyph_is_there():
  """matplotlib warns of a character that the font lacks."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def _texts(figure):
  return [t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text()]


def _is_png(figure):
  return figures.png(figure).startswith(b"\x89PNG")


def test_examples():
  assert doctest.testmod(figures).failed == 0


def test_lines_are_named_at_their_ends():
  lines = [Line("fine_tuned $", [1, 9], [0.5, 0.75]), Line("b", [1], [0.5])]
  figure = figures.accuracy(lines, chance=0.1)
  assert _is_png(figure)
  texts = _texts(figure)
  assert {"fine_tuned $ 75.0%", "b 50.0%", "chance 10.0%"} <= set(texts)


@pytest.mark.parametrize(
  "draw", [figures.loss, figures.learning_rate, figures.throughput]
)
@pytest.mark.parametrize("count", [1, 500])
def test_curves(draw, count):
  y = np.linspace(1e-3, 0, count)
  assert _is_png(draw([Line("", range(count), y)]))


def test_fewshot_shows_the_shots_as_ticks():
  figure = figures.fewshot([Line("a", [1, 5, 25], [0.2, 0.4, 0.6])])
  assert _is_png(figure)
  ticks = [t.get_text() for t in figure.axes[0].get_xticklabels()]
  assert ticks == ["1", "5", "25"]


def test_the_style_of_the_caller_stays():
  keys = ("font.size", "axes.grid", "lines.linewidth")
  before = [mpl.rcParams[k] for k in keys]
  figures.loss([Line("", [1, 2], [1.0, 0.5])])
  assert [mpl.rcParams[k] for k in keys] == before


@pytest.mark.parametrize(
  "names",
  [["Σ", "Ж"], ["$x_1$", "$"], ["ש", "ج"], ["golden_retriever" * 2, ""]],
)
def test_predictions_name_the_errors(names):
  images = np.zeros((3, 4, 4, 3), np.uint8)
  labels, guesses = [names[0]] * 3, [names[0], names[1], names[0]]
  figure = figures.predictions(images, labels, guesses, np.full(3, 0.5))
  assert _is_png(figure)
  texts = _texts(figure)
  assert sum(t.startswith("✗") for t in texts) == 1
  assert sum(t.startswith("true: ") for t in texts) == 1


def test_similarity_maps_lie_as_the_patches_do():
  # Orthogonal rows: each map is 1 at its own patch, and 0 elsewhere.
  figure = figures.similarity(np.eye(6), (2, 3), "before")
  assert _is_png(figure)
  mosaic = figure.axes[0].images[0].get_array().filled(np.nan)
  assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
  first, last = mosaic[:2, :3], mosaic[-2:, -3:]
  np.testing.assert_allclose(first, [[1, 0, 0], [0, 0, 0]])
  np.testing.assert_allclose(last, [[0, 0, 0], [0, 0, 1]])


def test_similarity_refuses_another_grid():
  with pytest.raises(ValueError, match="got 7 rows, expected 2 x 3 = 6"):
    figures.similarity(np.eye(7), (2, 3), "")

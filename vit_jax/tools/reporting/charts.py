"""The charts of the report.

They are drawn for a column of 470 pixels, so that the text is legible on a
telephone. They have the colours of the light page, which `page.chart` replaces
by variables of the page's style. Curves have the hues of Okabe and Ito, which
colour-blind readers can distinguish, with the contrast of text. Line styles
differ, too.
"""

import functools
import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vit_jax.tools.reporting import page
from vit_jax.tools.reporting.page import COLOURS

SOFT = COLOURS["soft"]
CURVE_COLOURS = tuple(COLOURS[f"curve-{i}"] for i in range(1, 7))
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (4, 1, 1, 1)), "-", "--")
MOST_LINES = len(DASHES)
_DPI = 200  # of images in a chart; lines and text are vectors
_STEPS = (1, 2, 2.5, 5, 10)  # distances of ticks, so that none is at 450
_TITLE_WIDTH = 40  # characters per line of a title, in bold
_LEGEND_WIDTH = 50  # characters per line of a legend
_STYLE = {
  "font.family": "DejaVu Sans",  # It has every glyph of the embedded data.
  "font.size": 10,
  "axes.titlesize": 11,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.facecolor": COLOURS["paper"],
  "axes.edgecolor": COLOURS["soft"],
  "axes.labelcolor": COLOURS["ink"],
  "axes.titlecolor": COLOURS["ink"],
  "axes.prop_cycle": mpl.cycler(color=CURVE_COLOURS),
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": COLOURS["line"],
  "grid.linewidth": 0.8,
  "text.color": COLOURS["ink"],
  "xtick.color": COLOURS["ink"],
  "ytick.color": COLOURS["ink"],
  "xtick.major.size": 0,
  "ytick.major.size": 0,
  "legend.frameon": False,
  "legend.fontsize": 9.5,
  "legend.handlelength": 2.4,
  "legend.labelspacing": 0.3,
  "lines.linewidth": 1.8,
  "figure.facecolor": COLOURS["paper"],
  "svg.fonttype": "path",
  "svg.hashsalt": "vit_jax",  # The same chart gives the same file.
}


class Line(NamedTuple):
  """A curve.

  y: A value that is not finite is a gap, with a cross on the axis.
  place: Index of the colour, from 0; None: the index among the lines.
  """

  label: str
  x: Sequence[float]
  y: Sequence[float]
  place: int | None = None


def render(draw: Callable[[], Figure]) -> str:
  """Returns a chart as an SVG file in the colours of the light page.

  Text is drawn as outlines, which need no font.

  Args:
    draw: One of the functions below, with its arguments.
  """
  with mpl.rc_context(_STYLE), warnings.catch_warnings():
    # The page has the names, also with characters that the font lacks.
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    file = io.StringIO()
    draw().savefig(file, dpi=_DPI, format="svg", metadata={"Date": None})
  return file.getvalue()


def file_stem(text: str) -> str:
  """Returns a text with "_" for characters that a file name should not have."""
  return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


class ChartFiles:
  """The charts of a page. `files` maps file names to SVG."""

  def __init__(self):
    self.files: dict[str, str] = {}

  def add(self, name: str, draw: Callable[[], Figure], alt: str) -> str:
    """Draws a chart, adds its file and returns the chart as HTML.

    Args:
      name: Name of the file without suffix; a second one gets a number.
      draw: One of the functions below, with its arguments.
      alt: Text that describes the chart.
    """
    stem = file_stem(name)
    names = itertools.chain(
      [f"{stem}.svg"], (f"{stem}_{i}.svg" for i in itertools.count(2))
    )
    file = next(name for name in names if name not in self.files)
    self.files[file] = render(draw)
    return page.chart(self.files[file], alt)


def curves(
  title: str,
  lines: Sequence[Line],
  value: str = "",
  tick: Callable[[float], str] = "{:g}".format,
  *,
  floor: float | None = None,
  top: float | None = None,
  is_noisy: bool = False,
  mark: tuple[float, str] | None = None,
  x_label: str = "step",
  x_end: int = 0,
) -> Figure:
  """Draws lines, and a legend with their names and last values.

  Args:
    title: Title of the chart.
    lines: Lines, of which the first `MOST_LINES` are drawn.
    value: Format of a value in the legend, such as "{:.1f}%"; "": no values.
    tick: Returns the text of a value on the y axis.
    floor: Smallest value of the y axis; None: matplotlib chooses.
    top: Largest value of the y axis, with `floor`; None: the largest value.
    is_noisy: Whether lines with many points get a running mean.
    mark: Value and name of a dotted line; None: no dotted line.
    x_label: Label of the x axis.
    x_end: Smallest end of the x axis.
  """
  figure = Figure(figsize=(4.8, 3.2), layout="constrained")
  axes = figure.subplots()
  entries: dict[Line2D, str] = {}
  for i, line in enumerate(lines[:MOST_LINES]):
    place = i if line.place is None else line.place
    colour, dashes = CURVE_COLOURS[place], DASHES[place]
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    if is_noisy and len(y) > 60:
      axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.3)
      y = _running_mean(y, len(y) // 30)
    marker = "o" if len(x) <= 12 else ""
    (drawn,) = axes.plot(
      x, y, color=colour, linestyle=dashes, marker=marker, markersize=4
    )
    finite = np.isfinite(y)
    if finite.any():
      last = np.asarray(line.y, float)[finite][-1]
      text = value.format(last) if finite[-1] else "not finite"
      name = line.label or "last" * bool(text)
      entries[drawn] = f"{name} {text}".strip()
    if not finite.all():
      on_axis = {"transform": axes.get_xaxis_transform(), "clip_on": False}
      bad = x[~finite]
      axes.plot(bad, 0 * bad, "x", color=colour, markersize=5, **on_axis)
  if mark:
    drawn = axes.axhline(mark[0], color=SOFT, linestyle=":", linewidth=1.2)
    entries[drawn] = f"{mark[1]} {value.format(mark[0])}"
  set_title(axes, title)
  axes.set_xlabel(x_label)
  finite = [v for l in lines for v in l.y if math.isfinite(v)]
  if floor is not None and finite:
    top = top or max(max(finite), mark[0] if mark else 0)
    axes.set_ylim(floor, (top or 1) * 1.08)
  x_end = max([x_end, *(x for l in lines for x in l.x)])
  axes.set_xlim(0, x_end * 1.02 or 1)
  axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS))
  axes.xaxis.set_major_formatter(lambda v, _: _count(v))
  axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
  axes.yaxis.set_major_formatter(lambda v, _: tick(v))
  add_legend(figure, entries)
  return figure


def _count(value: float) -> str:
  """Returns text like "12,500" or "2.5M"."""
  return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.6g}M"


def _power(value: float) -> str:
  """Returns text like "0.01" or "2.5e-4", without zeros in the exponent."""
  if value >= 0.01 or not value:
    return f"{value:.2g}"
  digits, exponent = f"{value:.1e}".split("e")
  return f"{digits.removesuffix('.0')}e{int(exponent)}"


loss = functools.partial(curves, "Training loss", value="{:.3g}", is_noisy=True)
learning_rate = functools.partial(
  curves, "Learning rate", tick=_power, floor=0.0
)
mae = functools.partial(curves, value="{:.4g}", floor=0.0)
throughput = functools.partial(
  curves, "Images per second", value="{:,.0f}", tick=_count, floor=0.0
)


def accuracy(
  lines: Sequence[Line],
  chance: float | None = None,
  title: str = "Accuracy",
  top: float = 0.0,
  **axis: Any,
) -> Figure:
  """Draws accuracies in percent.

  Args:
    lines: Accuracies, 0 to 1.
    chance: Accuracy of guessing, drawn as a dotted line; None: not drawn.
    title: Title of the chart.
    top: Largest value of the y axis; 0: the largest accuracy.
    **axis: `x_label` and `x_end` of `curves`.
  """
  return curves(
    title,
    [l._replace(y=[100 * v for v in l.y]) for l in lines],
    "{:.1f}%",
    "{:g}%".format,
    floor=0.0,
    top=100 * top,
    mark=None if chance is None else (100 * chance, "chance"),
    **axis,
  )


def scatter(
  true: Float[np.ndarray, " n"], predicted: Float[np.ndarray, " n"], name: str
) -> Figure:
  """Draws predicted against true numbers, with the line of equal ones.

  Args:
    true: The true numbers.
    predicted: The predicted numbers.
    name: Name of the number, for the axes.
  """
  figure = Figure(figsize=(4.8, 4.4), layout="constrained")
  axes = figure.subplots()
  low = min(true.min(), predicted.min())
  high = max(true.max(), predicted.max())
  ends = [low, high] if high > low else [low - 1, low + 1]
  (line,) = axes.plot(ends, ends, color=SOFT, linestyle=":", linewidth=1.2)
  axes.plot(
    true,
    predicted,
    "o",
    color=CURVE_COLOURS[0],
    markersize=3.5,
    alpha=0.5,
    markeredgewidth=0,
  )
  set_title(axes, f"{name}: predicted and true")
  axes.set_xlabel(f"true {name}", parse_math=False)
  axes.set_ylabel(f"predicted {name}", parse_math=False)
  axes.set_aspect("equal", adjustable="datalim")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(MaxNLocator(5, steps=_STEPS))
  add_legend(figure, {line: "predicted = true"})
  return figure


def fewshot(lines: Sequence[Line], title: str, top: float) -> Figure:
  """Draws accuracy over labelled images per class.

  Args:
    lines: Accuracies, 0 to 1.
    title: Title of the chart, with the L2 weight.
    top: Largest accuracy of all charts to compare, which have the same axis.
  """
  label = "labelled images per class"
  figure = accuracy(lines, title=title, top=top, x_label=label)
  shots = sorted({x for l in lines for x in l.x})
  set_log_axis(figure.axes[0], shots, shots)
  return figure


def set_log_axis(
  axes: Axes, places: Sequence[int | float], ticks: Sequence[int | float]
) -> None:
  """Makes the x axis logarithmic, with room for all `places`."""
  axes.set_xscale("log")
  axes.set_xlim(min(places) * 0.88, max(places) * 1.1)
  axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
  axes.minorticks_off()


def similarity(
  table: Float[np.ndarray, "n d"], grid: tuple[int, int], title: str
) -> Figure:
  """Draws cosine similarities between the position embeddings.

  There is one small map for each patch, at the place of the patch. The
  brightest point of a map is the patch itself.

  Args:
    table: Embeddings of the patches in raster order, without the class token.
    grid: Rows and columns of patches.
    title: Title of the chart.

  Raises:
    ValueError: The table has another number of rows than the grid.

  Source: arXiv:2010.11929, Figure 7 (centre).
  """
  h, w = grid
  if len(table) != h * w:
    raise ValueError(
      f"position table: got {len(table)} rows, expected {h} x {w} = {h * w},"
      " the patches of metadata.json's grid. Is has_cls_row right?"
    )
  norms = np.linalg.norm(table, axis=-1, keepdims=True)
  unit = table / np.maximum(norms, 1e-12)
  maps = (unit @ unit.T).reshape(h, w, h, w)
  gap = max(1, round(min(h, w) / 8))
  picture = mosaic(maps, gap)
  height = min(max(3.45 * len(picture) / len(picture[0]), 0.6), 5.0)  # inches
  figure = Figure(figsize=(4.8, height + 0.85), layout="constrained")
  axes = figure.subplots()
  drawn = axes.imshow(
    picture, vmin=-1, vmax=1, cmap="viridis", interpolation="nearest"
  )
  set_title(axes, title)
  hide_frame(axes)
  for axis, count in ((axes.xaxis, w), (axes.yaxis, h)):
    shown = np.arange(0, count, math.ceil(count / 8))
    axis.set_ticks(shown * (count + gap) + (count - 1) / 2, shown + 1)
  axes.set_xlabel("column of the patch")
  axes.set_ylabel("row of the patch" if height > 1.4 else "row")
  bar = figure.colorbar(
    drawn, ax=axes, aspect=6 * height, pad=0.03, panchor=(0.0, 1.0)
  )
  bar.set_ticks([-1, 0, 1], labels=["−1", "0", "1"])
  bar.outline.set_visible(False)
  bar.set_label("cosine similarity" if height > 1.4 else "cosine")
  return figure


def mosaic(images: np.ndarray, gap: int = 1) -> np.ndarray:
  """Joins images [rows, columns, h, w, ...] to one, with transparent gaps."""
  rows, columns, h, w, *channels = images.shape
  clear = 0.0 if channels else np.nan
  whole = np.full((rows, h + gap, columns, w + gap, *channels), clear)
  whole[:, :h, :, :w] = images.swapaxes(1, 2)
  whole = whole.reshape(rows * (h + gap), columns * (w + gap), *channels)
  return whole[:-gap, :-gap]


def hide_frame(axes: Axes) -> None:
  """Hides the grid and the frame of a picture."""
  axes.grid(False)
  for spine in axes.spines.values():
    spine.set_visible(False)


def set_title(axes: Axes, text: str) -> None:
  """Writes a title in lines that fit; further lines add height."""
  figure = axes.figure
  lines = textwrap.wrap(text, _TITLE_WIDTH)
  height = figure.get_figheight() + 0.19 * max(0, len(lines) - 1)
  figure.set_figheight(height)
  axes.set_title("\n".join(lines), parse_math=False)


def add_legend(figure: Figure, entries: dict[Line2D, str]) -> None:
  """Writes names of lines below the axes, except ""."""
  texts = {
    line: textwrap.fill(text, _LEGEND_WIDTH)
    for line, text in entries.items()
    if text
  }
  if not texts:
    return
  is_short = all(len(text) <= _LEGEND_WIDTH / 2 for text in texts.values())
  columns = 2 if is_short and len(texts) > 1 else 1
  lines = sum(1 + text.count("\n") for text in texts.values())
  height = 0.21 * math.ceil(lines / columns)
  figure.set_figheight(figure.get_figheight() + height)
  legend = figure.legend(
    list(texts), list(texts.values()), loc="outside lower left", ncols=columns
  )
  for text in legend.get_texts():
    text.set_parse_math(False)  # a run's name may have a dollar sign


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
  """Returns the mean over a centred window, which is shorter at both ends.

  Values that are not finite are kept, and are left out of other means.
  """
  half = max(width // 2, 1)
  finite = np.isfinite(values)
  sums, counts = (
    np.concatenate([[0.0], np.cumsum(v)])
    for v in (np.where(finite, values, 0.0), finite)
  )
  index = np.arange(len(values))
  first = np.maximum(index - half, 0)
  last = np.minimum(index + half + 1, len(values))
  count = counts[last] - counts[first]
  means = (sums[last] - sums[first]) / np.maximum(count, 1)
  return np.where(finite, means, np.nan)

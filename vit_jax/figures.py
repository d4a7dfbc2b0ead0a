"""The pictures of the report, one function each.

All are drawn for a column of 470 pixels, at twice that resolution, so that
their text is still legible on a telephone. Lines carry their names at their
ends; colours are those of Okabe and Ito, which stay apart for colour-blind
eyes, and line styles differ as well.
"""

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (4, 1, 1, 1)), "-", "--")
INK, FAINT, WRONG = "#222222", "#8a8a8a", "#B3261E"
DPI = 200
_STEPS = (1, 2, 2.5, 5, 10)  # Between ticks: no 300, 450.
MOST_LINES = len(COLOURS)
_STYLE = {
  "font.family": "DejaVu Sans",  # It has every glyph of the embedded data.
  "font.size": 10,
  "axes.titlesize": 11,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": FAINT,
  "axes.labelcolor": INK,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": "#e6e6e6",
  "grid.linewidth": 0.8,
  "text.color": INK,
  "xtick.color": INK,
  "ytick.color": INK,
  "xtick.major.size": 0,
  "ytick.major.size": 0,
  "lines.linewidth": 1.8,
  "figure.facecolor": "white",
}


class Line(NamedTuple):
  """A curve: its name, and its points in order."""

  label: str
  x: Sequence[float]
  y: Sequence[float]


def _styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
  """Draws with this module's style and leaves the caller's as it was."""

  @functools.wraps(draw)
  def styled(*args, **kwargs):
    with mpl.rc_context(_STYLE):
      return draw(*args, **kwargs)

  return styled


def png(figure: Figure) -> bytes:
  """Renders a figure."""
  buffer = io.BytesIO()
  figure.savefig(buffer, dpi=DPI, format="png")
  return buffer.getvalue()


@_styled
def loss(lines: Sequence[Line]) -> Figure:
  """Training loss over steps; where points are many, a running mean on top."""
  return _curves(
    "Training loss", lines, lambda v: f"{v:.3g}", axis="g", is_noisy=True
  )


@_styled
def learning_rate(lines: Sequence[Line]) -> Figure:
  """Learning rate over steps."""
  return _curves("Learning rate", lines, None, axis="e", floor=0.0)


@_styled
def accuracy(lines: Sequence[Line], chance: float | None = None) -> Figure:
  """Shares from 0 to 1 over steps, in percent; `chance` as a dotted line."""
  lines = [l._replace(y=[100 * v for v in l.y]) for l in lines]
  return _curves(
    "Accuracy",
    lines,
    lambda v: f"{v:.1f}%",
    axis="%",
    floor=0.0,
    mark=None if chance is None else (100 * chance, "chance"),
  )


@_styled
def throughput(lines: Sequence[Line]) -> Figure:
  """Images per second over steps, from 0."""
  return _curves(
    "Images per second", lines, lambda v: f"{v:,.0f}", axis=",", floor=0.0
  )


@_styled
def fewshot(lines: Sequence[Line]) -> Figure:
  """Accuracy in percent over examples per class, on a logarithmic axis."""
  lines = [l._replace(y=[100 * v for v in l.y]) for l in lines]
  figure = _curves(
    "Few-shot accuracy",
    lines,
    lambda v: f"{v:.1f}%",
    axis="%",
    floor=0.0,
    x_label="labelled images per class",
  )
  (axes,) = figure.axes
  shots = sorted({x for l in lines for x in l.x})
  axes.set_xscale("log")
  axes.set_xlim(shots[0] * 0.9, shots[-1] * 1.1)
  axes.set_xticks(shots, [f"{s:g}" for s in shots])
  axes.minorticks_off()
  return figure


@_styled
def predictions(
  images: np.ndarray,
  labels: Sequence[str],
  guesses: Sequence[str],
  probabilities: Float[np.ndarray, " n"],
  num_columns: int = 6,
) -> Figure:
  """Images with the class that the model names, errors framed and marked.

  Args:
    images: uint8 [n, h, w, 3].
    labels: True names.
    guesses: Names of the predictions.
    probabilities: That the model gives its predictions, 0 to 1.
    num_columns: Pictures in a row.
  """
  longest = max(map(len, [*labels, *guesses]))
  if longest > 8:  # Words, not characters: fewer and wider columns.
    num_columns = min(num_columns, 3)
  num_columns = min(num_columns, len(images))
  num_rows = math.ceil(len(images) / num_columns)
  cell = 4.8 / num_columns
  font = 11 if longest <= 3 else 9 if longest <= 8 else 8
  is_all_right = list(labels) == list(guesses)
  # Height of the lines below a picture, inches.
  text = (1.8 if is_all_right else 3.1) * font / 72
  figure = Figure(figsize=(4.8, num_rows * (cell + text)))
  grid = figure.subplots(num_rows, num_columns, squeeze=False)
  figure.subplots_adjust(
    left=0.01,
    right=0.99,
    top=1 - 0.06 / figure.get_figheight(),
    bottom=text / figure.get_figheight(),
    hspace=text / cell + 0.05,
    wspace=0.08,
  )
  for axes in grid.flat:
    axes.set_axis_off()
  # Names are set as they are: a "$" is no formula.
  write = functools.partial(_write, size=font, parse_math=False)
  rows = zip(grid.flat, images, labels, guesses, probabilities, strict=False)
  for axes, image, label, guess, probability in rows:
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.grid(False)
    said = f"{_short(guess)} {100 * probability:.0f}%"
    if guess == label:
      write(axes, 0, said, INK)
      continue
    write(axes, 0, f"✗ {said}", WRONG, weight="bold")
    write(axes, 1, f"true: {_short(label)}", INK)
    axes.add_patch(
      Rectangle(
        (0, 0),
        1,
        1,
        transform=axes.transAxes,
        fill=False,
        edgecolor=WRONG,
        linewidth=3,
        clip_on=False,
      )
    )
  return figure


@_styled
def similarity(
  table: Float[np.ndarray, "n d"], grid: tuple[int, int], title: str
) -> Figure:
  """Cosine similarity of each position's embedding with those of all.

  One small map per position, laid out as the patches are; the brightest point
  of a map is the position itself.

  Args:
    table: Embeddings of the patches in raster order, without a class token's.
    grid: Rows and columns of patches.
    title: Which table it is.

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
  mosaic = np.full((h, h + gap, w, w + gap), np.nan)
  mosaic[:, :h, :, :w] = maps.transpose(0, 2, 1, 3)
  mosaic = mosaic.reshape(h * (h + gap), w * (w + gap))[:-gap, :-gap]
  size = (4.8, 3.6 * h / w + 0.85)
  figure = Figure(figsize=size, layout="constrained")
  axes = figure.subplots()
  picture = axes.imshow(
    mosaic, vmin=-1, vmax=1, cmap="viridis", interpolation="nearest"
  )
  axes.grid(False)
  axes.set_title(title)
  for spine in axes.spines.values():
    spine.set_visible(False)
  for axis, count in ((axes.xaxis, w), (axes.yaxis, h)):
    shown = np.arange(0, count, math.ceil(count / 8))
    axis.set_ticks(shown * (count + gap) + (count - 1) / 2, shown + 1)
  axes.set_xlabel("column of the patch")
  axes.set_ylabel("row of the patch")
  bar = figure.colorbar(picture, cax=axes.inset_axes((1.03, 0, 0.045, 1)))
  bar.set_ticks([-1, 0, 1], labels=["−1", "0", "1"])
  bar.outline.set_visible(False)
  bar.set_label("cosine similarity", labelpad=-4)
  return figure


def _curves(
  title: str,
  lines: Sequence[Line],
  text: Callable[[float], str] | None,
  axis: str,
  *,
  floor: float | None = None,
  is_noisy: bool = False,
  mark: tuple[float, str] | None = None,
  x_label: str = "step",
) -> Figure:
  """Lines with their names at their right ends, and last values by `text`."""
  figure = Figure(figsize=(4.8, 3.2), layout="constrained")
  axes = figure.subplots()
  for line, colour, dashes in zip(lines, COLOURS, DASHES, strict=False):
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    if is_noisy and len(y) > 60:
      axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.3)
      y = _running_mean(y, len(y) // 30)
    marker = "o" if len(x) <= 12 else ""
    axes.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=4)
  if mark:
    axes.axhline(mark[0], color=FAINT, linestyle=":", linewidth=1.2)
  axes.set_title(title)
  axes.set_xlabel(x_label)
  finite = [v for l in lines for v in l.y if math.isfinite(v)]
  if floor is not None and finite:
    axes.set_ylim(floor, (max(max(finite), mark[0] if mark else 0) or 1) * 1.08)
  axes.set_xlim(0, max([x for l in lines for x in l.x], default=0) * 1.02 or 1)
  axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS))
  axes.xaxis.set_major_formatter(FuncFormatter(_tick(",")))
  axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
  axes.yaxis.set_major_formatter(FuncFormatter(_tick(axis)))
  ends = [
    (line.y[-1], _end(line, text), colour)
    for line, colour in zip(lines, COLOURS, strict=False)
    if len(line.y) and math.isfinite(line.y[-1])
  ]
  if mark:
    ends.append((mark[0], f"{mark[1]} {text(mark[0])}", FAINT))
  _label_ends(axes, ends)
  return figure


def _end(line: Line, text: Callable[[float], str] | None) -> str:
  return " ".join(filter(None, [line.label, text and text(line.y[-1])]))


def _label_ends(axes, ends: list[tuple[float, str, str]]) -> None:
  """Writes names right of the axes, at the lines' ends but never on top."""
  low, high = axes.get_ylim()
  heights = [(y - low) / (high - low) for y, _, _ in ends]
  for height, (_, text, colour) in zip(_spread(heights), ends, strict=True):
    axes.annotate(
      text,
      (1.02, height),
      xycoords="axes fraction",
      va="center",
      color=colour,
      fontsize=9.5,
      parse_math=False,
    )


def _spread(heights: Sequence[float], gap: float = 0.085) -> list[float]:
  """Moves heights apart to at least `gap`, keeping their order, inside 0-1.

  Example:
    >>> [round(h, 3) for h in _spread([0.5, 0.5])]
    [0.458, 0.542]
  """
  order = np.argsort(heights, kind="stable")
  placed = np.asarray(heights, float)[order]
  for _ in range(200):  # Push neighbours apart until none is too near.
    is_done = True
    for i in range(len(placed) - 1):
      lack = gap - (placed[i + 1] - placed[i])
      if lack > 1e-6:
        placed[i] -= lack / 2
        placed[i + 1] += lack / 2
        is_done = False
    if len(placed):
      placed += max(0.0, -placed[0]) - max(0.0, placed[-1] - 1.0)
    if is_done:
      break
  spread = np.empty_like(placed)
  spread[order] = placed
  return spread.tolist()


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
  """Mean over a centred window, cut short at both ends."""
  half = max(width // 2, 1)
  sums = np.concatenate([[0.0], np.cumsum(values)])
  index = np.arange(len(values))
  first = np.maximum(index - half, 0)
  last = np.minimum(index + half + 1, len(values))
  return (sums[last] - sums[first]) / (last - first)


def _tick(kind: str) -> Callable[[float, int], str]:
  texts = {
    "%": lambda v, _: f"{v:g}%",
    ",": lambda v, _: f"{v:,.0f}",
    "g": lambda v, _: f"{v:g}",
    "e": lambda v, _: f"{v:.2g}" if v >= 0.01 or not v else _power(v),
  }
  return texts[kind]


def _power(value: float) -> str:
  """Like "2.5e-4": f"{value:g}" takes more room, and pads the exponent."""
  digits, exponent = f"{value:.1e}".split("e")
  return f"{digits.removesuffix('.0')}e{int(exponent)}"


def _write(axes, line: int, text: str, colour: str, **kwargs) -> None:
  """Writes the line-th line below a picture."""
  axes.annotate(
    text,
    (0.5, 0),
    xycoords="axes fraction",
    xytext=(0, -3 - line * 1.35 * kwargs["size"]),
    textcoords="offset points",
    ha="center",
    va="top",
    color=colour,
    **kwargs,
  )


def _short(name: str, length: int = 15) -> str:
  """Cuts a long name; marks keep what follows on the right of a Hebrew one."""
  name = name if len(name) <= length else name[: length - 1] + "…"
  return f"\u200e{name}\u200e"

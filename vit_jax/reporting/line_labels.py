"""Names on charts: titles, and those of lines at their ends or below them."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D

LONG = 21  # Characters of a name that fits beside the axes.
GAP = 0.085  # Between names at line ends, of the height of the axes.
_TITLE = 38  # Characters of a line of a title, which is bold.


def end(name: str, value: str) -> str:
  """Returns a name and a value; a long name takes several lines."""
  return " ".join(filter(None, ["\n".join(_wrapped(name, 50)), value]))


def title(figure, axes, text: str) -> None:
  """Writes a title above the axes; each line beyond the first adds height.

  A title that is wider than the figure would take the axes' place.
  """
  lines = _wrapped(text, _TITLE)
  figure.set_figheight(figure.get_figheight() + 0.19 * (len(lines) - 1))
  axes.set_title("\n".join(lines), parse_math=False)


def _wrapped(text: str, width: int) -> list[str]:
  """Returns lines of at most `width` characters, broken after _ / , or space.

  Example:
    >>> _wrapped("a_bc/d", 4), _wrapped("abcde", 4), _wrapped("", 4)
    (['a_', 'bc/d'], ['abcd', 'e'], [''])
  """
  lines = [""]
  for part in re.split(r"(?<=[_/,\s])", text):
    if len(lines[-1]) + len(part) > width and lines[-1]:
      lines.append("")
    while len(part) > width:
      lines[-1], part = part[:width], part[width:]
      lines.append("")
    lines[-1] += part
  return lines


def beside(axes, ends: list[tuple[float, str, Line2D]]) -> None:
  """Writes names right of the axes, at the lines' ends, without overlap."""
  low, high = axes.get_ylim()
  heights = [(y - low) / (high - low) for y, _, _ in ends]
  for height, (_, text, drawn) in zip(_spread(heights), ends, strict=True):
    axes.annotate(
      text,
      (1.02, height),
      xycoords="axes fraction",
      va="center",
      color=drawn.get_color(),
      fontsize=9.5,
      parse_math=False,
    )


def below(figure, ends: list[tuple[float, str, Line2D]]) -> None:
  """Writes longer names below the axes, each on its own line."""
  count = sum(1 + text.count("\n") for _, text, _ in ends)
  figure.set_figheight(figure.get_figheight() + 0.21 * count)
  handles = [drawn for _, _, drawn in ends]
  legend = figure.legend(
    handles,
    [text for _, text, _ in ends],
    loc="outside lower left",
    frameon=False,
    fontsize=9.5,
    handlelength=2.4,
    labelspacing=0.3,
    labelcolor="linecolor",
  )
  for text in legend.get_texts():
    text.set_parse_math(False)


def _spread(heights: Sequence[float]) -> list[float]:
  """Moves heights apart to at least `GAP`, keeping their order, inside 0-1.

  Example:
    >>> [round(h, 3) for h in _spread([0.5, 0.5])]
    [0.458, 0.542]
  """
  order = np.argsort(heights, kind="stable")
  placed = np.asarray(heights, float)[order]
  for _ in range(200):  # Push neighbours apart until none is too near.
    is_done = True
    for i in range(len(placed) - 1):
      lack = GAP - (placed[i + 1] - placed[i])
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

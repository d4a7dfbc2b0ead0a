"""Charts of what a model learned: filters, distances, heads.

Drawn for the page as those of `figures`, which has the similarity of positions.
"""

import math

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vit_jax.models.filters import Components
from vit_jax.reporting import line_labels

_COLUMNS = 7  # components side by side, as in the paper


def filters(components: Components, title: str) -> Figure:
  """Draws principal components of filters as colours.

  Zero is grey; each component is scaled so that its largest absolute value is
  black or white.

  Args:
    components: See `vit_jax.models.filters`.
    title: Names the model.

  Source: arXiv:2010.11929, Figure 7 (left).
  """
  found = components.images
  scale = np.abs(found).max((1, 2, 3), keepdims=True)
  colours = 0.5 + found / np.maximum(scale, 1e-30) / 2
  rows = -(-len(found) // _COLUMNS)
  filled = np.full((rows * _COLUMNS, *found.shape[1:3], 4), 0.0)
  filled[: len(found), ..., :3] = colours
  filled[: len(found), ..., 3] = 1  # the places that stay empty are clear
  picture = _mosaic(filled.reshape(rows, _COLUMNS, *filled.shape[1:]))
  height, width, _ = picture.shape
  figure = Figure(
    figsize=(4.8, 4.6 * height / width + 0.65), layout="constrained"
  )
  axes = figure.subplots()
  axes.imshow(picture, interpolation="nearest")
  _bare(axes)
  axes.set_xticks([])
  axes.set_yticks([])
  line_labels.title(figure, axes, title)
  share = 100 * float(components.variances.sum())
  axes.set_xlabel(f"{len(found)} components, {share:.0f}% of the variance")
  return figure


def mean_distance(
  distances: Float[np.ndarray, "layers heads"], even: float, title: str
) -> Figure:
  """Draws the mean attention distance of each head over the depth.

  Args:
    distances: Pixels.
    even: Distance of a head that attends to all patches alike, pixels.
    title: Names the model.

  Source: arXiv:2010.11929, Figure 7 (right).
  """
  figure = Figure(figsize=(4.8, 3.2), layout="constrained")
  axes = figure.subplots()
  layers, heads = distances.shape
  colour = mpl.rcParams["axes.prop_cycle"].by_key()["color"][0]
  faint = mpl.rcParams["axes.edgecolor"]
  depth = np.arange(1, layers + 1)
  axes.axhline(even, color=faint, linestyle=":", linewidth=1.2)
  axes.annotate(
    "all patches\nalike",
    (1, even),
    xycoords=("axes fraction", "data"),
    xytext=(4, 0),
    textcoords="offset points",
    va="center",
    fontsize=9,
    color=mpl.rcParams["text.color"],
  )
  axes.plot(depth, distances.mean(1), color=colour, linewidth=1, alpha=0.5)
  axes.plot(
    np.repeat(depth, heads),
    distances.ravel(),
    "o",
    color=colour,
    markersize=5 if layers <= 12 else 4,
    alpha=0.75,
    markeredgewidth=0,
  )
  axes.set_ylim(0, 1.12 * max(even, float(distances.max())))
  axes.set_xlim(0.5, layers + 0.5)
  axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
  axes.set_xlabel("layer; a point for each head, a line for their mean")
  axes.set_ylabel("mean distance, pixels")
  line_labels.title(figure, axes, title)
  return figure


def heads(
  weights: Float[np.ndarray, "layers heads gh gw"],
  patch: tuple[int, int],
  image: UInt8[np.ndarray, "h w 3"],
  title: str,
) -> Figure:
  """Draws the attention of one patch: a row for each layer, a map per head.

  Each map is scaled to its own largest weight; the patch is framed, in the
  image above, too.

  Args:
    weights: On the patches.
    patch: Its row and column, from 0.
    image: As the model gets it.
    title: Names the model.
  """
  layers, num_heads, rows, columns = weights.shape
  top = weights.max((2, 3), keepdims=True)
  gap = max(1, round(min(rows, columns) / 6))
  picture = _mosaic(weights / np.maximum(top, 1e-30), gap)
  height, width = picture.shape
  maps_high = min(4.2 * height / width, 8.4)  # less wide than 4.2 then
  figure = Figure(figsize=(4.8, maps_high + 2.3), layout="constrained")
  above, axes = figure.subplots(2, 1, height_ratios=[1.4, maps_high])
  above.imshow(image, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5))
  above.set_aspect(image.shape[0] / image.shape[1] * columns / rows)
  above.set_anchor("W")
  _frame(above, patch[1], patch[0], 1.6)
  axes.imshow(picture, vmin=0, vmax=1, cmap="magma", interpolation="nearest")
  for layer in range(layers):
    for head in range(num_heads):
      corner = head * (columns + gap), layer * (rows + gap)
      _frame(axes, corner[0] + patch[1], corner[1] + patch[0], 0.9)
  _bare(above)
  axes.set_anchor("W")
  above.set_xticks([])
  above.set_yticks([])
  _bare(axes)
  for axis, count, side in (
    (axes.xaxis, num_heads, columns),
    (axes.yaxis, layers, rows),
  ):
    shown = np.arange(0, count, math.ceil(count / 16))
    axis.set_ticks(shown * (side + gap) + (side - 1) / 2, shown + 1)
  axes.set_xlabel("head")
  axes.set_ylabel("layer")
  line_labels.title(figure, above, title)
  return figure


def _frame(axes, x, y, width: float) -> None:
  """Frames the square around a point of a picture."""
  square = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False)
  square.set(edgecolor="#2fc99a", linewidth=width)
  axes.add_patch(square)


def _mosaic(images: np.ndarray, gap: int = 1) -> np.ndarray:
  """Returns images [rows, columns, h, w, ...] as one, with clear gaps."""
  rows, columns, h, w, *rest = images.shape
  empty = 0.0 if rest else np.nan
  whole = np.full((rows, h + gap, columns, w + gap, *rest), empty)
  whole[:, :h, :, :w] = images.swapaxes(1, 2)
  whole = whole.reshape(rows * (h + gap), columns * (w + gap), *rest)
  return whole[:-gap, :-gap]


def _bare(axes) -> None:
  axes.grid(False)
  for spine in axes.spines.values():
    spine.set_visible(False)

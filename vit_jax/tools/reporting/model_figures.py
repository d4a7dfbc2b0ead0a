"""Figures of what models learned, as sections of a page.

They are Figures 6, 7, 10 and 14 of arXiv:2010.11929, for one or more models.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vit_jax.batch import normalise
from vit_jax.checkpointing import checkpointer
from vit_jax.inference import overlay
from vit_jax.inference.pretrained import Pretrained, load
from vit_jax.models import inspection
from vit_jax.models.filters import (
  Components,
  filters_of,
  first_layer,
  principal_components,
)
from vit_jax.tools.reporting import charts, saved_images
from vit_jax.tools.reporting.charts import (
  CURVE_COLOURS,
  SOFT,
  ChartFiles,
  add_legend,
  hide_frame,
  mosaic,
  set_title,
)
from vit_jax.tools.reporting.page import error_text, gallery, missing
from vit_jax.tools.reporting.runs import Run

MOST_RUNS = 4  # runs of a report whose models are loaded
NUM_IMAGES = 64  # largest number of images that pass through a run's model
MOST_MACS = 10**12  # largest number of multiply-adds; some 10 s on 2 cores
NUM_SHOWN = 6  # images of a run that are shown beside their maps
_COLUMNS = 7  # components in a row, as in the paper


class InspectedModel(NamedTuple):
  """A model, and its attention on some images.

  name: Name of the model in file names.
  label: Name of the model on the page.
  vit: The model.
  images: Preprocessed images, uint8 [h, w, c].
  captions: A text for each image.
  distances: Mean attention distance over the images, pixels; None without
    images or attention.
  maps: The `inspection.attention_map` of each image; None without images or
    attention.
  positions: Position embedding of each patch; or an error, why there is none.
  """

  name: str
  label: str
  vit: Pretrained
  images: UInt8[np.ndarray, "b h w c"]
  captions: list[str]
  distances: Float[np.ndarray, "layers heads"] | None
  maps: Float[np.ndarray, "b gh gw"] | None
  positions: Float[np.ndarray, "n d"] | str

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of patches."""
    return self.vit.config.grid(self.vit.image_size)

  @property
  def has_attention(self) -> bool:
    """Whether the model is a Transformer."""
    return inspection.has_attention(self.vit.config)

  def check_maps(self) -> None:
    """Checks that there are attention maps.

    Raises:
      ValueError: The model has no attention, or there are no images.
    """
    if not self.has_attention:
      raise ValueError(f"{self.vit.config.variant} has no attention")
    if self.maps is None:
      raise ValueError("no images were given")


class Section(NamedTuple):
  """A section of a page.

  title: Heading of the section.
  text: Description of the pictures, HTML.
  body: The pictures, HTML; "": there are none.
  left_out: Texts about missing pictures, with reasons.
  """

  title: str
  text: str
  body: str
  left_out: list[str]

  def html(self, level: int = 2) -> str:
    """Returns the section with a heading of this level."""
    text = f"<p>{self.text}</p>" if self.body and self.text else ""
    return (
      f"<h{level}>{html.escape(self.title)}</h{level}>\n{text}{self.body}"
      f"{missing('; '.join(self.left_out))}"
    )


def inspect_model(
  name: str,
  label: str,
  vit: Pretrained,
  images: Sequence[UInt8[np.ndarray, "h w c"]],
  captions: Sequence[str],
) -> InspectedModel:
  """Passes images through a model, a few at a time.

  Args:
    name: Name of the model in file names.
    label: Name of the model on the page.
    vit: The model.
    images: Preprocessed images; the sequence may be empty.
    captions: A text for each image.

  Raises:
    ValueError: The attention is not finite.
  """
  images = (
    np.stack(images)
    if len(images)
    else np.zeros((0, *vit.image_shape), np.uint8)
  )
  try:
    table = inspection.position_table(vit.config, vit.params, vit.image_size)
  except ValueError as e:
    table = str(e)
  model = InspectedModel(
    name, label, vit, images, list(captions), None, None, table
  )
  if not (model.has_attention and len(images)):
    return model
  rows = inspection.batch_size(vit.config, vit.image_size)
  distances, maps = [], []
  for i in range(0, len(images), rows):
    some = images[i : i + rows]
    if i:  # pads the last batch, so that no other shape is compiled
      some = np.concatenate([some, images[: rows - len(some)]])
    result = inspection.survey(vit.config, vit.params, normalise(some))
    num = min(rows, len(images) - i)
    distances.append(np.asarray(result.distances)[:, :num])
    maps.append(np.asarray(result.maps)[:num])
  mean = np.concatenate(distances, 1).mean(1)
  if not np.isfinite(mean).all():
    raise ValueError(f"{label}: got attention that is not a number (NaN).")
  return model._replace(distances=mean, maps=np.concatenate(maps))


def all_sections(
  models: Sequence[InspectedModel],
  chart_files: ChartFiles,
  patch: tuple[int, int] | None,
  num_shown: int,
) -> list[Section]:
  """Returns all sections.

  Args:
    models: The models.
    chart_files: The charts of the page; the new ones are added.
    patch: Row and column, from 0, of the patch of the first image whose
      attention is drawn by head; None: the patch that gets most attention.
    num_shown: Largest number of images with a map.
  """
  maps = rollouts(models, num_shown)
  with_maps = [model for model in models if model.maps is not None]
  if with_maps and (more := len(with_maps[0].images) - num_shown) > 0:
    text = "image, whose map is" if more == 1 else "images, whose maps are"
    maps.left_out.append(f"{more:,} more {text} in rollout/")
  return [
    filters(models, chart_files),
    positions(models, chart_files),
    distances(models, chart_files),
    heads(models, chart_files, patch),
    maps,
  ]


def runs_section(runs: Sequence[Run], chart_files: ChartFiles) -> str:
  """Returns the section of a report: filters, positions, distances, maps.

  It shows the newest checkpoints of the first `MOST_RUNS` runs, on images that
  the runs saved; for a large model, on fewer images.

  Args:
    runs: The runs of the report.
    chart_files: The charts of the page; the new ones are added.
  """
  models, left_out = [], []
  for run in runs[:MOST_RUNS]:
    try:
      models.append(inspect_run(run))
    except Exception as e:  # A damaged checkpoint may raise anything.
      left_out.append(f"{run.name}: {error_text(e)}")
  if more := [run.name for run in runs[MOST_RUNS:]]:
    left_out.append(f"{', '.join(more)}: see vit-jax visualize")
  sections = []
  if models:
    sections = [
      filters(models, chart_files),
      positions(models, chart_files),
      distances(models, chart_files),
    ]
  texts = set()
  for model in models:
    section = rollouts([model], NUM_SHOWN)
    title = f"{section.title}: {model.label}"
    text = section.text if section.text not in texts else ""  # once for all
    texts.add(text)
    sections.append(section._replace(title=title, text=text))
  return (
    "<h2>Inside the models</h2>\n"
    + "".join(section.html(level=3) for section in sections)
    + missing("; ".join(left_out))
  )


def inspect_run(run: Run) -> InspectedModel:
  """Passes images that a run saved through its newest checkpoint.

  The result has only the parameters of the first layer, which `filters` needs,
  so that the models of several runs are not in memory together.

  Raises:
    FileNotFoundError: The run has no checkpoint.
  """
  if not (run.path / checkpointer.FOLDER).is_dir():
    raise FileNotFoundError("no checkpoint")
  vit = load(run.path, verbose=False)
  macs = vit.config.forward_macs(vit.image_size, vit.num_classes)
  num_images = int(min(NUM_IMAGES, max(1, MOST_MACS // macs)))
  predictions = saved_images.predictions(run, num_images)
  examples = predictions.first if predictions else []
  model = inspect_model(
    run.name,
    run.name,
    vit,
    [example.image for example in examples],
    [f"{e.guess} {100 * e.probability:.0f}%" for e in examples],
  )
  name = first_layer(vit.params)
  first = {} if name is None else {name: vit.params[name]}
  return model._replace(vit=dataclasses.replace(vit, params=first))


class _Charts:
  """Charts of one kind, one for each model.

  Attributes:
    html: The charts so far.
    left_out: Texts about models without a chart, with reasons.
  """

  def __init__(self, kind: str, alt: str, chart_files: ChartFiles):
    self._kind, self._alt, self._chart_files = kind, alt, chart_files
    self.html: list[str] = []
    self.left_out: list[str] = []

  def add(self, model: InspectedModel, draw: Callable[[], Figure]) -> None:
    """Draws a chart; if `draw` raises a ValueError, the chart is left out."""
    name = f"{self._kind}_{model.name}" if model.name else self._kind
    try:
      chart = self._chart_files.add(name, draw, f"{self._alt}, {model.label}")
    except ValueError as e:
      self.left_out.append(f"{model.label}, {e}")
    else:
      self.html.append(chart)

  def section(self, title: str, text: str) -> Section:
    """Returns the charts below a title and a text."""
    grid = f'<div class="grid">{"".join(self.html)}</div>' if self.html else ""
    return Section(title, text, grid, self.left_out)


def filters(
  models: Sequence[InspectedModel], chart_files: ChartFiles
) -> Section:
  """Returns the principal components of the filters of the first layer."""

  def draw(model: InspectedModel) -> Figure:
    what, kernel = filters_of(model.vit.config, model.vit.params)
    components = principal_components(kernel)
    return draw_filters(components, f"{model.label}: {what}")

  drawn = _Charts("filters", "principal components of filters", chart_files)
  for model in models:
    drawn.add(model, functools.partial(draw, model))
  return drawn.section(
    "Filters",
    "Principal components of the filters that see the pixels, the largest"
    " first. Grey is zero; each is scaled by itself.",
  )


def positions(
  models: Sequence[InspectedModel], chart_files: ChartFiles
) -> Section:
  """Returns the similarities of the position embeddings."""

  def draw(model: InspectedModel) -> Figure:
    if isinstance(model.positions, str):
      raise ValueError(model.positions)
    is_first_block = getattr(model.vit.config, "posemb_at", "") == "blocks"
    title = model.label + ", first block" * is_first_block
    rows, columns = model.grid
    return charts.similarity(
      model.positions, model.grid, f"{title}: {rows} × {columns}"
    )

  alt = "cosine similarity of position embeddings"
  drawn = _Charts("positions", alt, chart_files)
  for model in models:
    drawn.add(model, functools.partial(draw, model))
  return drawn.section(
    "Position embeddings",
    "Each small map belongs to one patch and is where the patch is; it shows"
    " how similar the embedding of its position is to all others.",
  )


def distances(
  models: Sequence[InspectedModel], chart_files: ChartFiles
) -> Section:
  """Returns the mean attention distances of all heads."""

  def draw(model: InspectedModel) -> Figure:
    model.check_maps()
    (height, width), (rows, columns) = model.vit.image_size, model.grid
    step = (height / rows, width / columns)
    even = float(inspection.distances((rows, columns), step).mean())
    return draw_mean_distance(model.distances, even, model.label)

  alt = "mean attention distance by layer and head"
  drawn = _Charts("distance", alt, chart_files)
  for model in models:
    drawn.add(model, functools.partial(draw, model))
  nums = sorted({len(i.images) for i in models if i.distances is not None})
  images = (
    "one image" if nums == [1] else f"{' or '.join(map(str, nums))} images"
  )
  return drawn.section(
    "Mean attention distance",
    "How far a patch looks: the distance to other patches, weighted by its"
    f" attention, in the mean over patches and {images}. The dotted line is the"
    " distance without preference.",
  )


def heads(
  models: Sequence[InspectedModel],
  chart_files: ChartFiles,
  patch: tuple[int, int] | None,
) -> Section:
  """Returns the attention of one patch of the first image, by head.

  Args:
    models: The models.
    chart_files: The charts of the page; the new ones are added.
    patch: See `all_sections`.
  """

  def draw(model: InspectedModel) -> Figure:
    model.check_maps()
    at = patch
    if at is None:
      y, x = divmod(int(model.maps[0].argmax()), model.grid[1])
      at = y, x
    config, image = model.vit.config, model.images[0]
    weights = inspection.by_head(
      config, model.vit.params, normalise(image[None]), at
    )
    title = f"{model.label}: row {at[0] + 1}, column {at[1] + 1}"
    return draw_heads(np.asarray(weights)[:, 0], at, image, title)

  alt = "attention of one patch by layer and head"
  drawn = _Charts("heads", alt, chart_files)
  for model in models:
    drawn.add(model, functools.partial(draw, model))
  which = "the patch" if patch else "the patch that is looked at most"
  return drawn.section(
    "Attention of one patch",
    f"Where {which} looks, in the first image: a row for each layer, a map for"
    " each head, with the patch framed. Each map is scaled to its own largest"
    " weight.",
  )


def rollouts(models: Sequence[InspectedModel], num_shown: int) -> Section:
  """Returns images beside the maps of all models."""
  left_out = []
  for model in models:
    try:
      model.check_maps()
    except ValueError as e:
      left_out.append(f"{model.label}, {e}")
  pairs = list(zip(range(num_shown), pictures(models), strict=False))
  with_maps = [model for model in models if model.maps is not None]
  order, whose = "Each image, the image lit by its map, and the map.", ""
  if len(with_maps) > 1:
    labels = [html.escape(model.label) for model in with_maps]
    order = f"Each image beside the maps of {', '.join(labels)}."
    whose = f" of {labels[0]}"
  answers = ""
  if with_maps and (vit := with_maps[0].vit).num_classes:
    answers = f" Below are the answer{whose} and its probability."
    if vit.is_regression:
      answers = f" Below are the predicted numbers{whose}."
  read = sorted({_read_by(model.vit.config.pool) for model in with_maps})
  text = (
    f"{order} A map is the rollout of attention, read by"
    f" {html.escape(', '.join(read))}; {overlay.SCALE}.{answers}"
  )
  body = gallery(pair for _, pair in pairs) if pairs else ""
  return Section("Where the model looks", text, body, left_out)


def pictures(
  models: Sequence[InspectedModel],
) -> Iterable[tuple[Image.Image, str]]:
  """Yields each image beside its map, or beside the maps of several models."""
  with_maps = [model for model in models if model.maps is not None]
  if not with_maps:
    return
  for i, caption in enumerate(with_maps[0].captions):
    pairs = [(model.images[i], model.maps[i]) for model in with_maps]
    if len(pairs) > 1:
      yield overlay.compared(pairs), caption
    else:
      yield overlay.beside(*pairs[0]), caption


def _read_by(pool: str) -> str:
  return {
    "token": "the class token",
    "gap": "the mean over the patches",
    "map": "the probe that pools the tokens",
    "token_gap": "the class token and the mean over the patches",
  }[pool]


def draw_filters(components: Components, title: str) -> Figure:
  """Draws principal components of filters as colours.

  Zero is grey. Each component is scaled so that its largest absolute value is
  black or white.

  Args:
    components: See `vit_jax.models.filters`.
    title: Title of the chart.

  Source: arXiv:2010.11929, Figure 7 (left).
  """
  images = components.images
  scale = np.abs(images).max((1, 2, 3), keepdims=True)
  colours = 0.5 + images / np.maximum(scale, 1e-30) / 2
  rows = -(-len(images) // _COLUMNS)
  filled = np.full((rows * _COLUMNS, *images.shape[1:3], 4), 0.0)
  filled[: len(images), ..., :3] = colours
  filled[: len(images), ..., 3] = 1  # empty places are transparent
  picture = mosaic(filled.reshape(rows, _COLUMNS, *filled.shape[1:]))
  height, width, _ = picture.shape
  figure = Figure(
    figsize=(4.8, 4.6 * height / width + 0.65), layout="constrained"
  )
  axes = figure.subplots()
  axes.imshow(picture, interpolation="nearest")
  hide_frame(axes)
  axes.set_xticks([])
  axes.set_yticks([])
  set_title(axes, title)
  share = 100 * float(components.variances.sum())
  axes.set_xlabel(f"{len(images)} components, {share:.0f}% of the variance")
  return figure


def draw_mean_distance(
  distances: Float[np.ndarray, "layers heads"], even: float, title: str
) -> Figure:
  """Draws the mean attention distance of each head over the depth.

  Args:
    distances: Mean distances, pixels.
    even: Distance of a head with the same attention to all patches, pixels.
    title: Title of the chart.

  Source: arXiv:2010.11929, Figure 7 (right).
  """
  figure = Figure(figsize=(4.8, 3.2), layout="constrained")
  axes = figure.subplots()
  layers, heads = distances.shape
  colour = CURVE_COLOURS[0]
  depth = np.arange(1, layers + 1)
  alike = axes.axhline(even, color=SOFT, linestyle=":", linewidth=1.2)
  (mean,) = axes.plot(
    depth, distances.mean(1), color=colour, linewidth=1, alpha=0.5
  )
  (each,) = axes.plot(
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
  axes.set_xlabel("layer")
  axes.set_ylabel("mean distance, pixels")
  set_title(axes, title)
  entries = {each: "a head", mean: "mean of the heads"}
  add_legend(figure, entries | {alike: "all patches alike"})
  return figure


def draw_heads(
  weights: Float[np.ndarray, "layers heads gh gw"],
  patch: tuple[int, int],
  image: UInt8[np.ndarray, "h w c"],
  title: str,
) -> Figure:
  """Draws the attention of one patch: a row per layer, a map per head.

  Each map is scaled by its largest weight. The patch has a frame, in the image
  above, too.

  Args:
    weights: Attention of the patch to all patches.
    patch: Row and column of the patch, from 0.
    image: The preprocessed image.
    title: Title of the chart.
  """
  layers, num_heads, rows, columns = weights.shape
  top = weights.max((2, 3), keepdims=True)
  gap = max(1, round(min(rows, columns) / 6))
  picture = mosaic(weights / np.maximum(top, 1e-30), gap)
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
  hide_frame(above)
  axes.set_anchor("W")
  above.set_xticks([])
  above.set_yticks([])
  hide_frame(axes)
  for axis, count, side in (
    (axes.xaxis, num_heads, columns),
    (axes.yaxis, layers, rows),
  ):
    shown = np.arange(0, count, math.ceil(count / 16))
    axis.set_ticks(shown * (side + gap) + (side - 1) / 2, shown + 1)
  axes.set_xlabel("head")
  axes.set_ylabel("layer")
  set_title(above, title)
  return figure


def _frame(axes: Axes, x: int, y: int, width: float) -> None:
  """Draws a frame around a point of a picture."""
  square = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False)
  square.set(edgecolor="#2fc99a", linewidth=width)
  axes.add_patch(square)

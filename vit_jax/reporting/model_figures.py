"""What models show of themselves, as parts of a page: Figures 6, 7, 10, 14.

Figures of arXiv:2010.11929. Several models stand side by side.
"""

import dataclasses
import functools
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax.batch import normalise
from vit_jax.checkpointing import checkpointer
from vit_jax.inference.pretrained import Pretrained, load
from vit_jax.models import inspection
from vit_jax.models.filters import (
  filters_of,
  first_layer,
  principal_components,
)
from vit_jax.reporting import figures, model_charts, overlay, saved_images
from vit_jax.reporting.page import gallery, missing
from vit_jax.reporting.runs import Run

MOST_RUNS = 4  # of a report that are loaded
NUM_IMAGES = 64  # of a run that are passed through, at most
MOST_MACS = 10**12  # of that; some 10 s on 2 cores
NUM_SHOWN = 6  # of a run beside their maps

# Keeps a chart and returns its HTML: (name of the file, function that draws it,
# alternative text).
Keep = Callable[[str, Callable[[], Any], str], str]


class Inside(NamedTuple):
  """A model, and what its attention does on some images.

  name: Its name in those of files.
  label: Its name on the page.
  vit: The model.
  images: As the model gets them.
  captions: A text for each.
  distances: Mean attention distance over these images, pixels; None: no images,
    or no attention.
  maps: Of each image, see `inspection.attention_map`; None likewise.
  """

  name: str
  label: str
  vit: Pretrained
  images: UInt8[np.ndarray, "b h w 3"]
  captions: list[str]
  distances: Float[np.ndarray, "layers heads"] | None
  maps: Float[np.ndarray, "b gh gw"] | None

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of patches."""
    return self.vit.config.grid(self.vit.image_size)

  @property
  def has_attention(self) -> bool:
    """Whether the model is a Transformer."""
    return inspection.has_attention(self.vit.config, self.vit.image_size)


class Part(NamedTuple):
  """A part of a page.

  title: Its heading.
  text: What it shows, HTML.
  body: Its pictures, HTML; "": there are none.
  left_out: What is not shown, and why.
  """

  title: str
  text: str
  body: str
  left_out: list[str]

  def html(self, level: int = 2) -> str:
    """Returns the part below a heading of that level."""
    text = f"<p>{self.text}</p>" if self.body and self.text else ""
    return (
      f"<h{level}>{html.escape(self.title)}</h{level}>\n{text}{self.body}"
      f"{missing('; '.join(self.left_out))}"
    )


def look(
  name: str,
  label: str,
  vit: Pretrained,
  images: Sequence[UInt8[np.ndarray, "h w 3"]],
  captions: Sequence[str],
) -> Inside:
  """Passes images through a model, a few at a time.

  Args:
    name: Of the model, in names of files.
    label: Of the model, on the page.
    vit: The model.
    images: As the model gets them, preprocessed; may be none.
    captions: A text for each.

  Raises:
    ValueError: The model's numbers are not finite.
  """
  shape = (*vit.image_size, 3)
  images = np.stack(images) if len(images) else np.zeros((0, *shape), np.uint8)
  inside = Inside(name, label, vit, images, list(captions), None, None)
  if not (inside.has_attention and len(images)):
    return inside
  rows = inspection.batch_size(vit.config, vit.image_size)
  distances, maps = [], []
  for i in range(0, len(images), rows):
    some = images[i : i + rows]
    if i:  # fill up the last batch, which else would be compiled
      some = np.concatenate([some, images[: rows - len(some)]])
    found = inspection.survey(vit.config, vit.params, normalise(some))
    num = min(rows, len(images) - i)
    distances.append(np.asarray(found.distances)[:, :num])
    maps.append(np.asarray(found.maps)[:num])
  mean = np.concatenate(distances, 1).mean(1)
  if not np.isfinite(mean).all():
    raise ValueError(
      f"{label}: got attention that is not a number (NaN), expected weights of"
      " a training that did not diverge."
    )
  return inside._replace(distances=mean, maps=np.concatenate(maps))


def parts(
  insides: Sequence[Inside],
  keep: Keep,
  patch: tuple[int, int] | None,
  num_shown: int,
) -> list[Part]:
  """Returns all there is to show.

  Args:
    insides: The models.
    keep: Keeps a chart.
    patch: Row and column, from 0, of the patch whose heads are shown, of the
      first image; None: the one that is looked at most.
    num_shown: Images with a map, at most.
  """
  return [
    filters(insides, keep),
    positions(insides, keep),
    distances(insides, keep),
    heads(insides, keep, patch),
    rollouts(insides, num_shown),
  ]


def of_runs(runs: Sequence[Run], keep: Keep) -> str:
  """Returns the section of a report: filters, distances, maps.

  Of the newest checkpoints of the first `MOST_RUNS` runs, on images that the
  runs kept; fewer, where passing them through a large model takes long.

  Args:
    runs: Of the report.
    keep: Keeps a chart.
  """
  insides, left_out = [], []
  for run in runs[:MOST_RUNS]:
    try:
      insides.append(_of_run(run))
    except Exception as e:  # A damaged checkpoint may raise anything.
      left_out.append(f"{run.name}: {str(e)[:200] or type(e).__name__}")
  if more := [run.name for run in runs[MOST_RUNS:]]:
    left_out.append(f"{', '.join(more)}: see vit-jax visualize")
  found = []
  if insides:
    found = [filters(insides, keep), distances(insides, keep)]
    told = set()
    for inside in insides:
      part = rollouts([inside], NUM_SHOWN)
      text = "" if part.text in told else part.text  # once for all runs
      told.add(text)
      title = f"{part.title}: {inside.label}"
      found.append(Part(title, text, part.body, _without([inside])))
  return (
    "<h2>Inside the models</h2>\n"
    + "".join(part.html(level=3) for part in found)
    + missing("; ".join(left_out))
  )


def _of_run(run: Run) -> Inside:
  if not (run.path / checkpointer.FOLDER).is_dir():
    raise FileNotFoundError("no checkpoint")
  vit = load(run.path, verbose=False)
  macs = vit.config.forward_macs(vit.image_size, vit.num_classes)
  num_images = int(min(NUM_IMAGES, max(1, MOST_MACS // macs)))
  found = saved_images.predictions(run, num_images)
  examples = found.first if found else []
  seen = look(
    run.name,
    run.label,
    vit,
    [example.image for example in examples],
    [f"{e.guess} {100 * e.probability:.0f}%" for e in examples],
  )
  # All that `filters` needs: large models of several runs are never in memory
  # together.
  name = first_layer(vit.params)
  first = {} if name is None else {name: vit.params[name]}
  return seen._replace(vit=dataclasses.replace(vit, params=first))


def filters(insides: Sequence[Inside], keep: Keep) -> Part:
  """Returns principal components of the first layers' filters."""
  drawn, left_out = [], []
  for inside in insides:
    try:
      what, kernel = filters_of(inside.vit.config, inside.vit.params)
    except ValueError as e:
      left_out.append(f"{inside.label}, {e}")
      continue
    components = principal_components(kernel)
    draw = functools.partial(
      model_charts.filters, components, f"{inside.label}: {what}"
    )
    alt = f"principal components of the filters, {inside.label}"
    drawn.append(keep(f"filters_{inside.name}", draw, alt))
  text = (
    "Principal components of the filters that see the pixels, the largest"
    " first. Grey is zero; each is scaled by itself."
  )
  return Part("Filters", text, _grid(drawn), left_out)


def positions(insides: Sequence[Inside], keep: Keep) -> Part:
  """Returns similarities of the positions of patches."""
  drawn, left_out = [], []
  for inside in insides:
    config = inside.vit.config
    try:
      table = inspection.position_table(
        config, inside.vit.params, inside.vit.image_size
      )
    except ValueError as e:
      left_out.append(f"{inside.label}, {e}")
      continue
    rows, columns = inside.grid
    title = f"{inside.label}: {rows} × {columns}"
    if config.posemb_at == "blocks":
      title += ", first block"
    draw = functools.partial(figures.similarity, table, (rows, columns), title)
    alt = f"cosine similarity of position embeddings, {inside.label}"
    drawn.append(keep(f"positions_{inside.name}", draw, alt))
  text = (
    "Each small map belongs to one patch and is where the patch is; it shows"
    " how similar the embedding of its position is to all others."
  )
  return Part("Position embeddings", text, _grid(drawn), left_out)


def distances(insides: Sequence[Inside], keep: Keep) -> Part:
  """Returns mean attention distances of all heads."""
  drawn, left_out = [], _without(insides)
  for inside in insides:
    if inside.distances is None:
      continue
    (height, width), (rows, columns) = inside.vit.image_size, inside.grid
    step = (height / rows, width / columns)
    even = float(inspection.distances((rows, columns), step).mean())
    draw = functools.partial(
      model_charts.mean_distance, inside.distances, even, inside.label
    )
    alt = f"mean attention distance by layer and head, {inside.label}"
    drawn.append(keep(f"distance_{inside.name}", draw, alt))
  nums = sorted({len(i.images) for i in insides if i.distances is not None})
  images = (
    "one image" if nums == [1] else f"{' or '.join(map(str, nums))} images"
  )
  text = (
    "How far a patch looks: the distance to other patches, weighted by its"
    f" attention, in the mean over patches and {images}. The dotted line is the"
    " distance without preference."
  )
  return Part("Mean attention distance", text, _grid(drawn), left_out)


def heads(
  insides: Sequence[Inside], keep: Keep, patch: tuple[int, int] | None
) -> Part:
  """Returns the attention of one patch of the first image, by head.

  Args:
    insides: The models.
    keep: Keeps a chart.
    patch: See `parts`.

  Raises:
    ValueError: The patch is outside a model's grid.
  """
  drawn, left_out = [], _without(insides)
  for inside in insides:
    if inside.maps is None:
      continue
    rows, columns = inside.grid
    at = patch
    if at is None:
      y, x = divmod(int(inside.maps[0].argmax()), columns)
      at = y, x
    weights = inspection.by_head(
      inside.vit.config, inside.vit.params, normalise(inside.images[:1]), at
    )
    title = f"{inside.label}: row {at[0] + 1}, column {at[1] + 1}"
    draw = functools.partial(
      model_charts.heads,
      np.asarray(weights)[:, 0],
      at,
      inside.images[0],
      title,
    )
    alt = f"attention of one patch by layer and head, {inside.label}"
    drawn.append(keep(f"heads_{inside.name}", draw, alt))
  which = "the patch" if patch else "the patch that is looked at most"
  text = (
    f"Where {which} looks, in the first image: a row for each layer, a map for"
    " each head, with the patch framed. Each map is scaled to its own largest"
    " weight."
  )
  return Part("Attention of one patch", text, _grid(drawn), left_out)


def rollouts(insides: Sequence[Inside], num_shown: int) -> Part:
  """Returns images beside the maps of all models."""
  left_out = _without(insides)
  pairs = list(zip(range(num_shown), pictures(insides), strict=False))
  with_maps = [inside for inside in insides if inside.maps is not None]
  if with_maps and (more := len(with_maps[0].images) - num_shown) > 0:
    text = "images, of which there are files"
    if more == 1:
      text = "image, of which there is a file"
    left_out.append(f"{more:,} more {text}")
  order, whose = "Each image, the image lit by its map, and the map.", ""
  if len(with_maps) > 1:
    labels = [html.escape(inside.label) for inside in with_maps]
    order = f"Each image beside the maps of {', '.join(labels)}."
    whose = f" of {labels[0]}"
  answers = f" Below are the answer{whose} and its probability."
  read = sorted({_read_by(inside.vit.config.pool) for inside in with_maps})
  text = (
    f"{order} Attention rollout, read by {html.escape(', '.join(read))}: from"
    " which patches the answer is drawn. Brightest is the patch with the most."
    f"{answers if with_maps and with_maps[0].vit.num_classes else ''}"
  )
  body = gallery(pair for _, pair in pairs) if pairs else ""
  return Part("Where the model looks", text, body, left_out)


def pictures(
  insides: Sequence[Inside],
) -> Iterable[tuple[Image.Image, str]]:
  """Yields each image beside its map, or beside the maps of several models."""
  with_maps = [inside for inside in insides if inside.maps is not None]
  if not with_maps:
    return
  for i, caption in enumerate(with_maps[0].captions):
    pairs = [(inside.images[i], inside.maps[i]) for inside in with_maps]
    if len(pairs) > 1:
      yield overlay.compared(pairs), caption
    else:
      yield overlay.beside(*pairs[0]), caption


def _without(insides: Sequence[Inside]) -> list[str]:
  """Returns the models of which there is no attention to show, and why."""
  return [
    f"{inside.label}, "
    + (
      "no images were given"
      if inside.has_attention
      else f"{inside.vit.config.variant} has no attention"
    )
    for inside in insides
    if inside.maps is None
  ]


def _read_by(pool: str) -> str:
  return {
    "token": "the class token",
    "gap": "the mean over all tokens",
    "map": "the probe that pools the tokens",
  }[pool]


def _grid(drawn: Sequence[str]) -> str:
  return f'<div class="grid">{"".join(drawn)}</div>' if drawn else ""

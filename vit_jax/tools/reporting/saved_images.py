"""Images that runs saved with their predictions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.callbacks.predictions import FILE
from vit_jax.tools.reporting.page import breakable, cards, error_text, missing
from vit_jax.tools.reporting.runs import R2, Run, short_name
from vit_jax.weights.npz_file import open_npz

NO_LABEL = "no label"
NUM_IMAGES = 24  # images on the page; also the number of mistakes


class Example(NamedTuple):
  """An image and the model's prediction.

  image: uint8 [h, w, 3].
  label: Name of the true class; if there are several, of the predicted one.
  guess: Name of the predicted class.
  probability: Probability of the predicted class, 0 to 1.
  """

  image: np.ndarray
  label: str
  guess: str
  probability: float


class Predictions(NamedTuple):
  """Images of a split that a run saved, with predictions.

  of: Data set and split, for a title.
  first: The first images of the split.
  mistakes: Mistakes, by falling probability.
  num_images: Number of images in the split.
  num_wrong: Number of mistakes in the split.
  """

  of: str
  first: list[Example]
  mistakes: list[Example]
  num_images: int
  num_wrong: int


def section(runs: Sequence[Run]) -> str:
  """Returns the first images of a split, and the worst mistakes."""
  parts, absent, damaged = [], [], []
  for run in runs:
    if run.evaluators(R2):  # see `regression`
      continue
    try:
      saved = predictions(run, NUM_IMAGES)
    except Exception as e:  # A damaged file may raise anything.
      damaged.append(f"{FILE} of {run.name}: {error_text(e)}")
      continue
    if saved is None or not saved.first:
      absent.append(run.name)
      continue
    title = f"{breakable(saved.of)}: {breakable(run.name)}"
    parts += [f"<h3>{title}</h3>", _first_and_worst(saved)]
  text = (
    "<p>Under each image, the class that the model names and the probability"
    " it gives it; errors are framed, the true class below.</p>"
  )
  if not parts and not absent and not damaged:
    return ""
  left_out = [f"{FILE} of {', '.join(absent)}"] if absent else []
  return (
    f"<h2>Images</h2>\n{text if parts else ''}{''.join(parts)}"
    f"{missing('; '.join(left_out + damaged))}"
  )


def _first_and_worst(saved: Predictions) -> str:
  """Returns the images, with captions that have their numbers."""
  first, mistakes = saved.first, saved.mistakes
  right = sum(e.label == e.guess for e in first)
  worst = f"{saved.num_wrong:,} of the {saved.num_images:,} images"
  worst += " are named wrongly"
  if len(mistakes) < saved.num_wrong:
    worst += f"; the {len(mistakes)} of the highest probability"
  return (
    f'<p class="soft">The first images: {right} of {len(first)} right.</p>'
    f'{cards(first)}<p class="soft">Worst mistakes: {worst}.</p>'
    f"{cards(mistakes) if mistakes else ''}"
  )


def predictions(run: Run, limit: int) -> Predictions | None:
  """Returns images that a run saved, with predictions; None if it saved none.

  Args:
    run: A run, with or without a predictions.npz.
    limit: Largest number of images, and of mistakes.

  Raises:
    ValueError, KeyError, OSError: The file is damaged.
  """
  path = run.path / FILE
  if not path.exists():
    return None
  data = {k: np.asarray(v) for k, v in open_npz(path).items()}
  if "image" not in data:  # of a regression
    return None
  names = run.metadata.get("class_names") or []
  first = _examples(data, "", names)
  mistakes = _examples(data, "mistake_", names)
  return Predictions(
    f"{short_name(str(data['dataset']))} {data['split']}"
    + ", fake" * run.is_fake,
    first[:limit],
    mistakes[:limit],
    int(data["num_images"]),
    int(data["num_wrong"]),
  )


def _examples(
  data: dict[str, np.ndarray], prefix: str, names: list[str]
) -> list[Example]:
  images, guesses, labels, probabilities = (
    data[prefix + k] for k in ("image", "prediction", "label", "probability")
  )
  if labels.ndim == 2:
    hits = np.take_along_axis(labels, guesses[:, None], axis=-1)[:, 0] > 0
    named = np.where(hits, guesses, labels.argmax(-1))
    labels = np.where(labels.max(-1) > 0, named, -1)

  def name(i: int) -> str:
    if i < 0:
      return NO_LABEL
    return names[i] if i < len(names) else str(i)

  rows = zip(images, labels, guesses, probabilities, strict=True)
  return [
    Example(i, name(int(l)), name(int(g)), float(p)) for i, l, g, p in rows
  ]

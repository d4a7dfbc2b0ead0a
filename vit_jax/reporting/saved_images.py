"""What a run saved besides numbers: predictions, and the position table."""

from typing import NamedTuple

import numpy as np

from vit_jax.checkpointing import checkpointer
from vit_jax.models.resample import resample_posemb
from vit_jax.reporting.runs import Run, short_name
from vit_jax.weights.npz_file import open_npz

NO_LABEL = "no label"
TABLE = ("Transformer", "posembed_input", "pos_embedding")


class Example(NamedTuple):
  """An image and the model's prediction.

  image: uint8 [h, w, 3].
  label: Name of the true class; of several, the one that was predicted, if any.
  guess: Name of the predicted class.
  probability: Its probability by the model, 0 to 1.
  """

  image: np.ndarray
  label: str
  guess: str
  probability: float


class Predictions(NamedTuple):
  """Images of a split that a run saved, with predictions.

  of: Data set and split, as a title has them.
  first: The first images of it.
  mistakes: Mistakes, by falling probability.
  num_images: Number of images of the split.
  num_wrong: Number of mistakes among these.
  """

  of: str
  first: list[Example]
  mistakes: list[Example]
  num_images: int
  num_wrong: int


def predictions(run: Run, limit: int) -> Predictions | None:
  """Returns images that a run saved, with predictions; None: it has none.

  Args:
    run: A run, with a predictions.npz or without.
    limit: Most images, and most mistakes.

  Raises:
    ValueError, KeyError, OSError: The file is damaged.
  """
  path = run.path / "predictions.npz"
  if not path.exists():
    return None
  data = {k: np.asarray(v) for k, v in open_npz(path).items()}
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


class Positions(NamedTuple):
  """A learned position embedding.

  table: [1 n d].
  grid: Rows and columns of patches.
  has_cls_row: Whether row 0 belongs to the class token.
  """

  table: np.ndarray
  grid: tuple[int, int]
  has_cls_row: bool

  def of_patches(self) -> np.ndarray:
    """Returns the rows of the patches, [h*w d]."""
    return self.table[0, int(self.has_cls_row) :]

  def resampled(self, grid: tuple[int, int]) -> "Positions":
    """Returns the table that fine-tuning on this grid starts from."""
    new = resample_posemb(self.table, self.grid, grid, self.has_cls_row)
    return Positions(new, grid, self.has_cls_row)


def load_positions(run: Run) -> Positions:
  """Reads the table of a run's newest checkpoint.

  Raises:
    ValueError: The model has no such table, or no grid is recorded.
    FileNotFoundError: The run has no checkpoint.
  """
  if not (run.path / checkpointer.FOLDER).is_dir():
    raise FileNotFoundError("no checkpoint")
  params, metadata = checkpointer.load_params(str(run.path))
  metadata = run.metadata | metadata
  for key in TABLE:
    params = params.get(key) if isinstance(params, dict) else None
  if params is None:
    raise ValueError("no learned table before the first block")
  if "grid" not in metadata:
    raise ValueError("its metadata has no grid")
  table, (h, w) = np.asarray(params, np.float32), metadata["grid"]
  return Positions(table, (h, w), bool(metadata["has_cls_row"]))

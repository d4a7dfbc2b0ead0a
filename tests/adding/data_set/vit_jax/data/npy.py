"""Arrays on disk: "npy:/path".

Every split is a folder /path/<split> with images.npy, uint8 [n, h, w, 3], and
labels.npy, integers [n].
"""

import dataclasses
import functools
import pathlib

import numpy as np

from vit_jax.data import splits
from vit_jax.data.source import Record, Source
from vit_jax.data.tf_cpu import tf

PREFIX = "npy:"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NpySource(Source):
  """Rows of two arrays; a split is a sub-folder."""

  images: np.ndarray
  all_labels: np.ndarray

  @functools.cached_property
  def _labels(self) -> tf.Tensor:
    with tf.init_scope():  # The first use may be inside a traced function.
      return tf.constant(self.all_labels)

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    index = raw["index"]
    image = tf.numpy_function(lambda i: self.images[i], [index], tf.uint8)
    image = tf.ensure_shape(image, self.images.shape[1:])
    label = tf.gather(self._labels, index)
    return {"image": image, "label": label, "index": index}

  def labels(self) -> np.ndarray:
    """See `Source`."""
    return self.all_labels


def open_npy(dataset: str, split: str, data_dir: str | None) -> NpySource:
  """Opens "npy:/path"; its sub-folders are the splits.

  Raises:
    ValueError: Unknown split, or nothing there.
  """
  del data_dir
  root = pathlib.Path(dataset.removeprefix(PREFIX))
  arrays = {
    path.parent.name: (np.load(path, mmap_mode="r"), np.load(labels))
    for path in sorted(root.glob("*/images.npy"))
    if (labels := path.parent / "labels.npy").exists()
  }
  if not arrays:
    raise ValueError(
      f"got data set {dataset!r}, expected <split>/images.npy and labels.npy"
      f" in {root}."
    )
  spans = splits.parse_split(split, {k: len(v[1]) for k, v in arrays.items()})
  images = [arrays[s.split][0][s.start : s.stop] for s in spans]
  labels = [arrays[s.split][1][s.start : s.stop] for s in spans]
  every = np.concatenate([v[1] for v in arrays.values()])
  return NpySource(
    name=dataset,
    split=split,
    num_examples=splits.num_records(spans),
    num_classes=int(every.max()) + 1,
    images=images[0] if len(images) == 1 else np.concatenate(images),
    all_labels=np.concatenate(labels).astype(np.int32),
  )

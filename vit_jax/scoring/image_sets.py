"""Sets of images that files of weights are scored on, by their short names."""

from typing import NamedTuple


class Set(NamedTuple):
  """A set of images, and how it is scored.

  dataset: Name in TFDS.
  split: Its split.
  classes: The classes of `imagenet_subsets` among which the answer is sought;
    None: all.
  """

  dataset: str
  split: str
  classes: str | None = None


SETS = {
  "imagenet2012": Set("imagenet2012", "validation"),
  "real": Set("imagenet2012_real", "validation"),
  "v2": Set("imagenet_v2", "test"),
  "a": Set("imagenet_a", "test", "imagenet_a"),
  "r": Set("imagenet_r", "test", "imagenet_r"),
  "sketch": Set("imagenet_sketch", "test"),
  "a_clean": Set("imagenet2012", "validation", "imagenet_a"),
  "r_clean": Set("imagenet2012", "validation", "imagenet_r"),
}
AVAILABLE = "available"

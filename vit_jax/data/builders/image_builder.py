"""The base of builders of image files, which are stored in TFDS unchanged.

Records without a label, or whose image cannot be decoded, are left out and
listed. TFDS renames a temporary folder at the end, so a data set exists whole
or not at all.
"""

import collections
import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from vit_jax.data import images
from vit_jax.data.builders import embedded
from vit_jax.data.images import MAX_UNDECODABLE
from vit_jax.paths import printable

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_REPORT_EVERY = 10  # seconds
# Records that may be left out in any case; size of a split if it is unknown.
_FEW, _MANY = 10, 10_000


# A class; the classes of an image that may have any number of them; or numbers
# to predict, float32 [outputs].
Label = int | tuple[int, ...] | np.ndarray


class Entry(NamedTuple):
  """A record: its unique name, encoded image and label, or an error."""

  key: str
  image: bytes = b""
  label: Label = -1
  error: str = ""


class Split(NamedTuple):
  """A split: its number of records, broken ones included, if known."""

  count: int | None
  entries: Callable[[], Iterator[Entry]]


class TooManyLeftOut(ValueError):
  """More than a hundredth of a split (and more than ten records), or all."""


class RecordFilter:
  """Checks the records of a data set, and lists those that are left out.

  Args:
    say: Called with lines about the progress.
    max_pixels: See `images.read`.

  Attributes:
    left_out: (record, its error), in order.
    num_without_class: For multi-label data, number of images without a class.
    converted: Format -> number of images stored as PNG instead, because
      TensorFlow cannot read the format, or reads it wrongly.
  """

  def __init__(
    self,
    say: Callable[[str], None] = print,
    max_pixels: int = images.MAX_PIXELS,
  ):
    self.left_out: list[tuple[str, str]] = []
    self.converted = collections.Counter()
    self.num_without_class = 0
    self._say, self._max_pixels = say, max_pixels

  def examples(self, name: str, split: Split) -> Iterator[tuple[str, dict]]:
    """Yields the records of a split, as a builder does.

    Raises:
      TooManyLeftOut: The message lists the first of them.
    """
    start = reported = time.monotonic()
    taken, before = 0, len(self.left_out)
    entries = _checked(split.entries(), self._max_pixels)
    for entry, encoded, format_name, error in entries:
      taken += 1
      if error:
        self.left_out.append((entry.key, error))
        self._refuse_too_many(name, before, max(taken, split.count or _MANY))
      else:
        self.converted.update([format_name] if format_name else [])
        # The names of features that `tfds_source.find_label` looks for.
        key = "labels" if isinstance(entry.label, tuple) else "label"
        self.num_without_class += key == "labels" and not entry.label
        yield entry.key, {"image": encoded, key: entry.label}
      if time.monotonic() - reported > _REPORT_EVERY:
        reported = time.monotonic()
        total = f" of {split.count:,}" if split.count else ""
        self._say(
          f"{name}: {taken:,}{total} records read,"
          f" {taken / (reported - start):,.0f}/s,"
          f" {len(self.left_out) - before} left out; now at {entry.key}"
        )
    self._refuse_too_many(name, before, taken)
    errors = self.left_out[before:]
    if len(errors) == taken:
      got = f"got no usable record of split {name!r}, expected one."
      raise TooManyLeftOut(f"{got}{_listed(errors)}")
    self._say(
      f"{name}: all {taken:,} records read in {time.monotonic() - start:,.0f}"
      " s; TFDS orders and writes them ..."
    )

  def _refuse_too_many(self, name: str, before: int, count: int) -> None:
    errors = self.left_out[before:]
    if len(errors) > max(_FEW, MAX_UNDECODABLE * count):
      raise TooManyLeftOut(
        f"got {len(errors)} records of split {name!r} without a label or a"
        f" readable image, expected at most {MAX_UNDECODABLE:.0%}, or ten:"
        f"{_listed(errors)}"
      )


def _listed(errors: list[tuple[str, str]]) -> str:
  return "".join(f"\n  {key}: {error}" for key, error in errors[:_FEW])


class ImageBuilder(embedded.EmbeddedBuilder, skip_registration=True):
  """A builder of encoded images with labels.

  Args:
    record_filter: Checks the records; None for a new one.
    **kwargs: Arguments of the base class.
  """

  def __init__(self, *, record_filter: RecordFilter | None = None, **kwargs):
    self.record_filter = record_filter or RecordFilter()
    super().__init__(**kwargs)

  def _info_of(
    self,
    description: str,
    label: tfds.features.FeatureConnector,
    is_multilabel: bool = False,
  ):
    key = "labels" if is_multilabel else "label"
    if is_multilabel:
      label = tfds.features.Sequence(label)
    return embedded.EmbeddedInfo(
      builder=self,
      description=description,
      features=tfds.features.FeaturesDict(
        {"image": tfds.features.Image(), key: label}
      ),
      supervised_keys=("image", key),
    )

  def _generate_examples(self, name: str, split: Split):
    return self.record_filter.examples(name, split)


def _checked(
  entries: Iterator[Entry], max_pixels: int
) -> Iterator[tuple[Entry, bytes, str, str]]:
  """Yields (entry, *`checked`) in order; threads decode the images.

  Keys become printable, because TFDS accepts only text.
  """
  workers = os.cpu_count() or 1
  with futures.ThreadPoolExecutor(workers) as pool:
    waiting = collections.deque()
    for entry in entries:
      entry = entry._replace(key=printable(entry.key))
      waiting.append((entry, pool.submit(checked, entry, max_pixels)))
      if len(waiting) > 4 * workers:
        entry, result = waiting.popleft()
        yield entry, *result.result()
    for entry, result in waiting:
      yield entry, *result.result()


def checked(
  entry: Entry, max_pixels: int = images.MAX_PIXELS
) -> tuple[bytes, str, str]:
  """Returns the bytes to store, the original format, and the error or "".

  JPEG and PNG are stored unchanged, and the format is "". Other formats are
  stored as PNG: the first frame, in colour, 8 bits.
  """
  if entry.error:
    return b"", "", entry.error
  images.allow(max_pixels)
  is_unchanged = entry.image.startswith((_JPEG, _PNG))
  try:
    file = io.BytesIO(entry.image)
    with Image.open(file, formats=images.FORMATS) as image:
      images.check_size(image, max_pixels)
      if is_unchanged:
        image.draft(None, (1, 1))  # JPEG at an eighth of its size: faster.
        image.load()
        return entry.image, "", ""
      file = io.BytesIO()
      pixels = images.read_with_alpha(image, max_pixels=max_pixels)
      Image.fromarray(pixels).save(file, format="png")
      return file.getvalue(), image.format or "?", ""
  except Image.UnidentifiedImageError:
    return b"", "", f"{len(entry.image):,} bytes that are no image"
  except images.BROKEN as e:
    if isinstance(e, Image.DecompressionBombError):
      e = images.size_error_of(e, max_pixels)
    text = str(e).replace(images.LIMIT_OPTION, "--max_pixels")
    return b"", "", f"cannot be decoded: {text}"

"""Records of data sets that TFDS has written to disk."""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data import builders, order, splits
from vit_jax.data.host_tf import as_is, tf
from vit_jax.data.records import Record, Source
from vit_jax.variants import nearest

EMBEDDED = (builders.Digits.name, builders.Glyphs.name)
MEMORY_LIMIT = 256 * 2**20  # Bytes of encoded records.
_MANUAL_FILES = {
  "imagenet2012": "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar"
}
_NOT_IN_TFDS = ("imagenet21k",)
# What TFDS warns of when all is well.
_NOISE = ("Using custom data configuration", "Variant folder")
logging.getLogger("absl").addFilter(
  lambda record: not record.getMessage().startswith(_NOISE)
)
_BATCH = 1024  # Records parsed at a time, where none is decoded.
_READ_AHEAD = 2**18  # Bytes, of each of up to a thousand open files.
_PROBES, _PROBED = 16, 32  # Places looked at for their order; records of each.


class Piece(NamedTuple):
  """Consecutive records of a file: `take` of them after `skip`."""

  file: str
  skip: int
  take: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsFiles(Source):
  """Records in files, as serialized examples."""

  pieces: tuple[Piece, ...]

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    return {**_parse(raw["example"], ("image", "label")), "index": raw["index"]}

  def labels(self) -> np.ndarray:
    """See `Source`; reads the whole split."""
    return self.columns("label")["label"].numpy()

  def columns(self, *names: str) -> dict[str, tf.Tensor]:
    """Reads the whole split: "image" (encoded bytes) or "label" or both."""
    batches = (
      self.raw(0, self.num_examples)
      .batch(_BATCH)
      .map(as_is(lambda raw: _parse(raw["example"], names)))
      .prefetch(1)
    )
    parts = list(batches)
    return {k: tf.concat([p[k] for p in parts], 0) for k in names}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsByNumber(TfdsFiles):
  """Fetches records by number, from files of format array_record."""

  @functools.cached_property
  def _records(self):
    # Late: TFDS has the package on Linux alone.
    from array_record.python import array_record_data_source

    return array_record_data_source.ArrayRecordDataSource(
      [f"{p.file}[{p.skip}:{p.skip + p.take}]" for p in self.pieces]
    )

  def fetch(self, indices: tf.Tensor) -> Record:
    """See `Source`; also the serialized `example`."""

    def read(indices):
      examples = self._records.__getitems__(indices.tolist())
      return np.array(examples, object)

    examples = tf.numpy_function(read, [indices], tf.string)
    examples = tf.ensure_shape(examples, indices.shape)
    return {"index": indices, "example": examples}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsStream(TfdsFiles):
  """Reads tfrecord files from their beginnings; for what fits no memory."""

  is_by_number = False

  def raw(self, start, stop) -> tf.data.Dataset:
    """See `Source`; skipped records of a file are not read."""
    num = self.num_examples
    start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
    begins = self.file_starts()
    begins = np.concatenate([begins, begins + num])  # twice round
    takes = [piece.take for piece in self.pieces] * 2
    first = tf.searchsorted(begins + takes, [start], side="right")[0]
    last = tf.searchsorted(begins, [stop], side="left")[0]
    files = tf.data.Dataset.range(
      tf.cast(first, tf.int64), tf.cast(last, tf.int64)
    )
    names = tf.constant([piece.file for piece in self.pieces] * 2)
    skips = tf.constant([piece.skip for piece in self.pieces] * 2, tf.int64)
    begins, ends = tf.constant(begins), tf.constant(begins + takes)

    @as_is
    def read(i):
      # Of this file's part of the split, the part within start and stop.
      low = tf.maximum(begins[i], start)
      high = tf.minimum(ends[i], stop)
      records = tf.data.TFRecordDataset(names[i], buffer_size=_READ_AHEAD)
      return records.skip(skips[i] + low - begins[i]).take(high - low)

    records = tf.data.Dataset.zip(
      tf.data.Dataset.range(start, stop), files.flat_map(read)
    )
    return records.map(as_is(lambda i, e: {"index": i % num, "example": e}))

  def raw_at(self, indices: np.ndarray) -> tf.data.Dataset:
    """See `Source`; reads all files between the first and the last index."""
    wanted = np.zeros(self.num_examples, bool)
    wanted[indices] = True
    wanted = tf.constant(wanted)
    raw = self.raw(min(indices), max(indices) + 1)
    return raw.filter(as_is(lambda record: tf.gather(wanted, record["index"])))

  def file_starts(self) -> np.ndarray:
    """See `Source`."""
    takes = np.array([piece.take for piece in self.pieces], np.int64)
    return np.cumsum(takes) - takes

  def note(self) -> str:
    """See `Source`: tells if neighbours have the same class."""
    places = np.linspace(
      0, max(0, self.num_examples - _PROBED), _PROBES, dtype=np.int64
    )
    labels = np.stack(
      [
        self._labels_from(place, _PROBED)
        for place in np.unique(places).tolist()
      ]
    )
    of_neighbours = (labels[:, 1:] == labels[:, :-1]).mean()
    counts = np.unique(labels, return_counts=True)[1]
    by_chance = ((counts / labels.size) ** 2).sum()
    if of_neighbours - by_chance < 0.25:
      return ""
    return (
      f"{self.name!r} [{self.split}] is stored in the order of its classes:"
      f" {of_neighbours:.0%} of neighbours have the same, {by_chance:.0%} would"
      " by chance. A batch is drawn from many places of the files, and is still"
      " mixed worse than one drawn from all records. Write the data set as"
      " array_record, whose records are drawn by number, or in a random order."
    )

  def _labels_from(self, start: int, num: int) -> np.ndarray:
    examples = self.raw(start, min(start + num, self.num_examples)).batch(num)
    parsed = _parse(next(iter(examples))["example"], ("label",))
    return parsed["label"].numpy()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsMemory(Source):
  """Reads the split once and keeps the encoded records in memory."""

  files: TfdsFiles

  @functools.cached_property
  def _columns(self) -> dict[str, tf.Tensor]:
    with tf.init_scope():  # The first use may be inside a traced function.
      return self.files.columns("image", "label")

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    index = raw["index"]
    columns = {k: tf.gather(v, index) for k, v in self._columns.items()}
    return {**columns, "index": index}

  def labels(self) -> np.ndarray:
    """See `Source`."""
    return self._columns["label"].numpy()


# Format of TFDS -> what reads files of it that are too many for the memory.
_FORMATS = {"tfrecord": TfdsStream, "array_record": TfdsByNumber}


def open_tfds(dataset: str, split: str, data_dir: str | None) -> Source:
  """Opens a TFDS data set; prepares it only if it needs no download.

  A split of up to 256 MiB is kept in memory, encoded, once for the process.

  Raises:
    ValueError: See `sources.open_source`.
  """
  builder = find_builder(dataset, data_dir)
  check_features(dataset, builder)
  if not builder.is_prepared():
    builder = _prepare(builder, dataset, data_dir)
  stored_as = builder.info.file_format.value
  if stored_as not in _FORMATS:
    raise ValueError(
      f"got data set {dataset!r}, written to {builder.data_dir} as"
      f" {stored_as}, expected {' or '.join(_FORMATS)}; prepare it again with"
      " one of these as file_format."
    )
  infos = builder.info.splits
  spans = splits.parse_split(
    split, {name: info.num_examples for name, info in infos.items()}
  )
  label = builder.info.features["label"]
  known = dict(
    name=dataset,
    split=split,
    num_examples=splits.num_records(spans),
    num_classes=label.num_classes,
    # Without names in the metadata, TFDS makes them up: "0", "1", ...
    class_names=tuple(label.names),
  )
  pieces = [p for span in spans for p in _pieces(infos, span)]
  files = _FORMATS[stored_as](pieces=tuple(pieces), **known)
  num_bytes = sum(
    infos[s.split].num_bytes * (s.stop - s.start) / infos[s.split].num_examples
    for s in spans
  )
  if num_bytes > MEMORY_LIMIT:
    _allow_open_files()
    return files
  return TfdsMemory(files=files, **known)


def _allow_open_files() -> None:
  """Raises the process's own limit of open files to what streams may need."""
  try:
    import resource  # of Unix
  except ImportError:
    return
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = order.MAX_PLACES + 1024  # beside those of everything else
  if hard != resource.RLIM_INFINITY:
    wanted = min(wanted, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def will_be_made(dataset: str, data_dir: str | None) -> bool:
  """True for an embedded data set that is not on disk yet.

  Raises:
    ValueError: See `find_builder`.
  """
  builder = find_builder(dataset, data_dir)
  return builder.name in EMBEDDED and not builder.is_prepared()


def class_names(dataset: str, data_dir: str | None) -> tuple[str, ...]:
  """Returns the classes by label, without looking at the disk for records.

  Raises:
    ValueError: See `find_builder`.
  """
  return tuple(find_builder(dataset, data_dir).info.features["label"].names)


def find_builder(dataset: str, data_dir: str | None, known=()):
  """Returns the builder, without looking at the disk for records.

  Args:
    dataset: see `sources.open_source`.
    data_dir: see there.
    known: further names, to be suggested for an unknown one.

  Raises:
    ValueError: Unknown data set, or a config that it does not have.
  """
  try:
    return tfds.builder(dataset, data_dir=data_dir)
  except tfds.core.registered.DatasetNotFoundError:
    if dataset in _NOT_IN_TFDS:
      raise ValueError(
        f"got data set {dataset!r}, which is not on disk and which TFDS cannot"
        " prepare; write its images to folders, one per class, and use"
        " folder:/path, or make them up with fake_data=True."
      ) from None
    known = {*known, *known_names()}
    raise ValueError(
      f"got data set {dataset!r}, expected a name that TFDS knows, such as"
      f" cifar10, or folder:/path/to/images.{nearest(dataset, known)}"
    ) from None
  except (ValueError, TypeError, AttributeError) as e:
    if os.path.isdir(dataset):
      raise ValueError(
        f"got data set {dataset!r}, which is a folder: write folder:{dataset}."
      ) from None
    first = str(e).strip().splitlines()[0]
    raise ValueError(f"got data set {dataset!r}: {first}") from None


def known_names() -> list[str]:
  """Returns the names that TFDS knows, the embedded sets among them."""
  return [*tfds.list_builders(with_community_datasets=False), *EMBEDDED]


def check_features(dataset: str, builder) -> None:
  """Raises ValueError unless there is an 8-bit `image` and a `label`."""
  features = builder.info.features
  # A data set may have no dictionary of features at all.
  named = dict(features) if hasattr(features, "keys") else {"": features}
  image, label = named.get("image"), named.get("label")
  good = (
    isinstance(image, tfds.features.Image)
    and np.dtype(image.np_dtype) == np.uint8
    and isinstance(label, tfds.features.ClassLabel)
    and label.num_classes
  )
  if not good:
    raise ValueError(
      f"got data set {dataset!r} with the features {named!r},"
      " expected an 8-bit `image` and one class as `label`. Write the images"
      " to folders, one per class, and use folder:/path."
    )


def _prepare(builder, dataset: str, data_dir: str | None):
  if builder.name not in EMBEDDED:
    raise ValueError(_how_to_prepare(builder, dataset, data_dir))
  print(
    f"Data set {dataset!r} is not in {builder.data_dir}: making it now, no"
    " download needed ...",
    flush=True,
  )
  start = time.monotonic()
  try:
    # TFDS talks of a download and draws nested bars; the lines here say it.
    with contextlib.redirect_stdout(None):
      tfds.disable_progress_bar()
      builder.download_and_prepare()
  except (OSError, ValueError, tf.errors.OpError):
    # TFDS writes elsewhere and renames at the end, which fails for all but
    # the first of several processes; then the data are there all the same.
    builder = find_builder(dataset, data_dir)
    if not builder.is_prepared():
      raise
  print(
    f"Data set {dataset!r} made in {time.monotonic() - start:.0f} s.",
    flush=True,
  )
  return find_builder(dataset, data_dir)


def _how_to_prepare(builder, dataset: str, data_dir: str | None) -> str:
  # Not the command `tfds build`: it asks for apache_beam, which few have.
  where = f", data_dir={data_dir!r}" if data_dir else ""
  code = (
    "import tensorflow_datasets as tfds;"
    f" tfds.builder({dataset!r}{where}).download_and_prepare()"
  )
  # TFDS 4.9.10 imports it to write any data set, and does not install it.
  has_extra = importlib.util.find_spec("importlib_resources")
  extra = "" if has_extra else "pip install importlib_resources && "
  text = (
    f"got data set {dataset!r}, which is not prepared: expected its records"
    f" in {builder.data_dir}. Nothing is downloaded unasked; to do it once,"
    f' run: {extra}python -c "{code}"'
  )
  if builder.name in _MANUAL_FILES:
    text += (
      f" (before that, put {_MANUAL_FILES[builder.name]} from image-net.org,"
      f" unopened, into {builder.data_dir_root}/downloads/manual)"
    )
  return text + ". To try the program without data, add --fake_data."


def _pieces(infos, span: splits.Span) -> Sequence[Piece]:
  """Returns where the records of a span lie."""
  out, begin = [], 0
  info = infos[span.split]
  for file in info.file_instructions:
    end = begin + file.take
    low, high = max(begin, span.start), min(end, span.stop)
    if low < high:
      out.append(Piece(file.filename, file.skip + low - begin, high - low))
    begin = end
  return out


def _parse(example: tf.Tensor, names: Sequence[str]) -> Record:
  """Parses one serialized example or a batch; the image stays encoded."""
  types = {"image": tf.string, "label": tf.int64}
  features = {k: tf.io.FixedLenFeature([], types[k]) for k in names}
  parsed = tf.io.parse_example(example, features)
  if "label" in parsed:
    parsed["label"] = tf.cast(parsed["label"], tf.int32)
  return parsed

"""Data sets of TFDS: finds and checks them, prepares the embedded ones."""

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from etils import epath

from vit_jax.data import builders, numbers, order, splits
from vit_jax.data.source import Source
from vit_jax.data.tf_cpu import tf
from vit_jax.data.tfds_records import (
  Piece,
  TfdsByNumber,
  TfdsFiles,
  TfdsMemory,
  TfdsStream,
)
from vit_jax.options import nearest

EMBEDDED = (builders.Digits.name, builders.Glyphs.name)
MEMORY_LIMIT = 256 * 2**20  # Bytes of encoded records.
# Files that a user downloads for a data set. TFDS itself would go on without
# one of them, and leave a split out.
_MANUAL_FILES = {
  "imagenet2012": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")
}
# Features that may have several classes of an image.
_SEVERAL = ("real_label", "labels")


# Format of TFDS -> source that reads its files.
_READERS = {"tfrecord": TfdsStream, "array_record": TfdsByNumber}


def open_tfds(dataset: str, split: str, data_dir: str | None) -> Source:
  """Opens a TFDS data set; prepares it only if it needs no download.

  Raises:
    ValueError: See `sources.open_source`.
  """
  builder = find_builder(dataset, data_dir)
  check_features(dataset, builder)
  builder = prepared(builder, dataset, data_dir)
  infos = builder.info.splits
  spans = splits.parse_split(
    split, {name: info.num_examples for name, info in infos.items()}
  )
  label = find_label(builder.info.features)
  pieces = [p for span in spans for p in pieces_of(infos, span)]
  return reader(builder, dataset)(
    name=dataset,
    split=split,
    num_examples=splits.num_records(spans),
    num_classes=len(label.names),
    # Where the metadata have no names, TFDS invents "0", "1", ...
    class_names=label.names,
    is_multilabel=label.is_multilabel,
    is_regression=label.is_regression,
    label_key=label.key,
    pieces=tuple(pieces),
    file_bytes=bytes_of(infos, spans),
    is_embedded=builder.name in EMBEDDED,
  )


def in_memory_if_small(source: Source) -> Source:
  """Returns a source that keeps the encoded records of small files in memory.

  Sources that are larger than 256 MiB, or are not files of TFDS, do not change.
  """
  if not source.file_bytes:
    return source
  if source.file_bytes > MEMORY_LIMIT:
    _allow_open_files()
    return source
  copied = ("name", "split", "num_examples", "num_classes", "class_names")
  copied += ("is_multilabel", "is_regression", "remark")
  return TfdsMemory(files=source, **{k: getattr(source, k) for k in copied})


def _allow_open_files() -> None:
  """Raises the process's limit of open files to what streams may need."""
  try:
    import resource  # Unix only
  except ImportError:
    return
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = order.MAX_PLACES + 1024  # 1024 for everything else
  if hard != resource.RLIM_INFINITY:
    wanted = min(wanted, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def names_if_generated(
  dataset: str, data_dir: str | None
) -> tuple[str, ...] | None:
  """Returns the classes of an embedded data set that is not on disk yet.

  Raises:
    ValueError: See `find_builder`.
  """
  builder = find_builder(dataset, data_dir)
  if builder.name not in EMBEDDED or builder.is_prepared():
    return None
  return find_label(builder.info.features).names


def find_builder(dataset: str, data_dir: str | None, known=()):
  """Returns the builder, without looking for records on disk.

  Args:
    dataset: See `sources.open_source`.
    data_dir: See `sources.open_source`.
    known: Further names to suggest if a data set is unknown.

  Raises:
    ValueError: Unknown data set, or a config that it does not have.
  """
  try:
    with _without_warnings():  # "Using custom data configuration"
      return tfds.builder(dataset, data_dir=data_dir)
  except tfds.core.registered.DatasetNotFoundError:
    if names := _on_disk(dataset, data_dir):
      expected = f"a version that is on disk: {' or '.join(names)}."
    else:
      expected = "a name that TFDS knows, one that `vit-jax prepare` imported,"
      expected += " or folder:/path/to/images."
      expected += nearest(dataset, {*known, *known_names()})
    raise ValueError(f"got data set {dataset!r}, expected {expected}") from None
  except (ValueError, TypeError, AttributeError) as e:
    # TFDS has no name with a slash at its start or end, as paths have.
    is_path = os.path.isdir(dataset)
    first = "write folder:PATH." if is_path else str(e).strip().splitlines()[0]
    raise ValueError(f"got data set {dataset!r}: {first}") from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
  """TFDS logs no warnings meanwhile."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)


def is_prepared(builder) -> bool:
  """Returns whether the records of a builder are on disk."""
  with _without_warnings():  # "Variant folder ... has no dataset_info.json"
    return builder.is_prepared()


def _on_disk(dataset: str, data_dir: str | None) -> list[str]:
  """Returns the versions of a data set on disk, such as "birds:1.0.0"."""
  name = dataset.partition(":")[0]
  root = epath.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  versions = tfds.core.utils.version.list_all_versions(root / name)
  return [f"{name}:{version}" for version in versions]


def known_names() -> list[str]:
  """Returns the names that TFDS knows, embedded data sets included."""
  return [*tfds.list_builders(with_community_datasets=False), *EMBEDDED]


def check_features(dataset: str, builder) -> None:
  """Raises ValueError unless there is an 8-bit `image` and a label."""
  features = builder.info.features
  # A data set may have no dictionary of features at all.
  named = dict(features) if hasattr(features, "keys") else {"": features}
  image, label = named.get("image"), find_label(named)
  good = (
    isinstance(image, tfds.features.Image)
    and np.dtype(image.np_dtype) == np.uint8
    and label
    # ImageNet-21k's classes are known once it is made from its tars.
    and (label.names or not is_prepared(builder))
  )
  if not good:
    raise ValueError(
      f"got data set {dataset!r} with the features {named!r}, expected an 8-bit"
      " `image`, and a class or float32 numbers as `label`, or several classes"
      f" as {' or '.join(_SEVERAL)}; see vit-jax prepare --help."
    )


class Label(NamedTuple):
  """The feature that is the label: name, classes, whether it has several.

  For regression, `names` are those of the numbers.
  """

  key: str
  names: tuple[str, ...]
  is_multilabel: bool = False
  is_regression: bool = False


def find_label(features) -> Label | None:
  """Returns the feature that is the label, or None.

  It is `label` if that is one class, a real number or a vector of real numbers
  (a regression). Otherwise it is the first of `real_label` (ImageNet's
  reassessed labels) and `labels` (VOC: classes of all objects, also the
  difficult ones) that is a sequence of classes.
  """
  classes = tfds.features.ClassLabel
  if "label" in features and isinstance(features["label"], classes):
    return Label("label", _names(features["label"]))
  if "label" in features and (names := numbers.names_of(features["label"])):
    return Label("label", names, is_regression=True)
  for key in _SEVERAL:
    of = getattr(features[key], "feature", None) if key in features else None
    if isinstance(of, classes):
      return Label(key, _names(of), True)
  return None


def _names(feature: tfds.features.ClassLabel) -> tuple[str, ...]:
  return tuple(feature.names) if feature.num_classes else ()


def reader(builder, dataset: str) -> type[TfdsFiles]:
  """Returns the class of sources that reads a data set's files.

  Raises:
    ValueError: The files have another format.
  """
  file_format = builder.info.file_format.value
  if file_format not in _READERS:
    raise ValueError(
      f"got data set {dataset!r} in the format {file_format} of"
      f" {builder.data_dir}, expected {' or '.join(_READERS)}."
    )
  return _READERS[file_format]


def prepared(builder, dataset: str, data_dir: str | None):
  """Returns a builder whose records are on disk; generates embedded ones.

  Raises:
    NotOnDisk: They are not there; the message has the command to prepare them.
  """
  if is_prepared(builder):
    return builder
  if builder.name not in EMBEDDED:
    raise splits.NotOnDisk(_how_to_prepare(builder, dataset, data_dir))
  print(
    f"Data set {dataset!r} is not in {builder.data_dir}: generating it, without"
    " a download ...",
    flush=True,
  )
  start = time.monotonic()
  try:
    # TFDS prints about a download and draws nested bars.
    with contextlib.redirect_stdout(None):
      tfds.disable_progress_bar()
      builder.download_and_prepare()
  except (OSError, ValueError, tf.errors.OpError):
    # TFDS renames a temporary folder at the end, which fails for all but the
    # first of several processes; by then the data exist.
    builder = find_builder(dataset, data_dir)
    if not builder.is_prepared():
      raise
  print(
    f"Data set {dataset!r} generated in {time.monotonic() - start:.0f} s.",
    flush=True,
  )
  return find_builder(dataset, data_dir)


def manual_files(builder) -> tuple[tuple[str, ...], str]:
  """Returns the files that a user must download, and a text about them.

  Returns:
    Names of files, empty if they are not fixed; a description, "" for a data
    set that needs none.
  """
  names = _MANUAL_FILES.get(builder.name, ())
  if names:
    return names, f"{' and '.join(names)} from image-net.org, unopened"
  return (), " ".join((builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").split())


def _how_to_prepare(builder, dataset: str, data_dir: str | None) -> str:
  command = f"vit-jax prepare {shlex.quote(dataset)}"
  if data_dir:
    command += f" --data_dir={shlex.quote(data_dir)}"
  names = _on_disk(dataset, data_dir)
  others = f"; on disk is {' or '.join(names)}" if names else ""
  text = (
    f"got data set {dataset!r}, which is not prepared. --fake_data tries the"
    f" program without data; to prepare it once: {command}"
  )
  if needed := manual_files(builder)[1]:
    text += f" --manual_dir=FOLDER (in which you put {needed})"
  return f"{text}. Expected were its records in {builder.data_dir}{others}."


def pieces_of(infos, span: splits.Span) -> Sequence[Piece]:
  """Returns the pieces of files that have the records of a span."""
  pieces, begin = [], 0
  for file in infos[span.split].file_instructions:
    end = begin + file.take
    low, high = max(begin, span.start), min(end, span.stop)
    if low < high:
      pieces.append(Piece(file.filename, file.skip + low - begin, high - low))
    begin = end
  return pieces


def bytes_of(infos, spans: Sequence[splits.Span]) -> int:
  """Returns roughly how many bytes of files the records of spans have."""
  return sum(
    infos[s.split].num_bytes * (s.stop - s.start) // infos[s.split].num_examples
    for s in spans
  )

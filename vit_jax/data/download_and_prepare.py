"""Puts data sets on disk in TFDS's format, for `vit-jax prepare`."""

import argparse
import contextlib
import errno
import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import tensorflow_datasets as tfds
from etils import epath

from vit_jax.data import tfds_source
from vit_jax.data.builders.image_builder import ImageBuilder, RecordFilter
from vit_jax.data.dataset_info import prefix_of
from vit_jax.data.operation import MAX_PIXELS
from vit_jax.options import unexpected
from vit_jax.paths import is_remote

_NAME = re.compile(r"[a-z][a-z0-9_]*")
WITH_NUMBERS = ("csv:", "parquet:")  # kinds of sources with --numbers
# Options of `vit-jax prepare` for the sources of a user.
ONLY_IMPORTS = (
  *("name", "splits", "image", "label", "classes", "numbers", "max_pixels"),
)
LEFT_OUT = "left_out.txt"  # in the data set's folder: records left out
_SHOWN = 20  # of them in the output

Say = Callable[[str], None]

if TYPE_CHECKING:
  from vit_jax.finetune.data.imports.listing import Options


class Prepared(NamedTuple):
  """A data set on disk.

  folder: Its files.
  splits: Split -> number of records.
  num_classes: Number of classes; None without a label (VTAB makes the labels of
    some data sets from other features).
  left_out: Number of records that were left out.
  is_regression: Whether num_classes is the number of regression targets.
  """

  folder: str
  splits: dict[str, int]
  num_classes: int | None
  left_out: int
  is_regression: bool = False


def prepare(
  dataset: str,
  data_dir: str | None = None,
  manual_dir: str | None = None,
  say: Say = print,
  file_format: str | None = None,
) -> Prepared:
  """Prepares a data set of TFDS, or `imagenet21k`; TFDS downloads it if it can.

  An existing data set does not change.

  Args:
    dataset: Name in TFDS, with a config if it has several.
    data_dir: Folder of TFDS's data; None for $TFDS_DATA_DIR, or
      ~/tensorflow_datasets.
    manual_dir: Folder of the files that the user downloaded; None for
      downloads/manual in `data_dir`.
    say: Called with lines about the progress. Its output to sys.stdout is
      discarded while TFDS writes.
    file_format: array_record or tfrecord. None for array_record, whose records
      can be read by number, if that library is installed.

  Raises:
    ValueError: Unknown data set, missing files, too many broken records, a full
      disk, or records that exist in another format.
  """
  builder = tfds_source.find_builder(dataset, data_dir)
  if tfds_source.is_prepared(builder):
    stored = builder.info.file_format.value
    if file_format not in (None, stored):
      expected = f"{stored}, as in {builder.data_dir}"
      raise ValueError(unexpected("--file_format", file_format, expected))
    say(f"{dataset} is in {builder.data_dir} already; nothing to do.")
    return _prepared(builder, 0)
  _check_is_local(builder)
  folder = epath.Path(builder.data_dir_root) / "downloads" / "manual"
  folder = epath.Path(manual_dir).expanduser() if manual_dir else folder
  names, needed = tfds_source.manual_files(builder)
  missing = [name for name in names if not (folder / name).is_file()]
  if missing or (needed and not folder.is_dir()):
    expected = f"a folder with {needed}"
    raise ValueError(unexpected("--manual_dir", folder, expected))
  options = {}
  if isinstance(builder, ImageBuilder):
    options["record_filter"] = RecordFilter(say)
  elif file_format is None and importlib.util.find_spec("array_record"):
    file_format = "array_record"
  if file_format is not None:
    options["file_format"] = file_format
  builder = tfds.builder(dataset, data_dir=data_dir, **options)
  config = tfds.download.DownloadConfig(manual_dir=str(folder))
  _write(builder, say, config)
  return _finished(builder, say)


def _check_is_local(builder: tfds.core.DatasetBuilder) -> None:
  """Raises ValueError for a bucket, where array_record cannot write."""
  folder = str(builder.data_dir)
  if is_remote(folder):
    expected = "a folder on a disk, which can be copied to a bucket afterwards"
    raise ValueError(unexpected("--data_dir", folder, expected))


def import_source(
  source: str,
  name: str,
  data_dir: str | None = None,
  options: "Options | None" = None,
  say: Say = print,
  file_format: str | None = None,
  max_pixels: int = MAX_PIXELS,
) -> Prepared:
  """Imports a source into a new data set of TFDS's format.

  Args:
    source: A prefix of `finetune.data.imports.KINDS` and what follows it.
    name: Name of the data set, for `--config.data.dataset`.
    data_dir: See `prepare`.
    options: The user's options for the source.
    say: Called with lines about the progress.
    file_format: See `prepare`.
    max_pixels: Largest height x width; larger images are left out.

  Raises:
    ValueError: The name is taken or malformed, the source has an error, or the
      disk is full.
  """
  from vit_jax.finetune.data.builder import OwnData
  from vit_jax.finetune.data.imports import KINDS, Options

  if not _NAME.fullmatch(name):
    expected = "a small letter, then small letters, digits and underscores"
    raise ValueError(unexpected("--name", repr(name), expected))
  if name in {*tfds_source.known_names(), *tfds_source.builders.__all__}:
    raise ValueError(unexpected("--name", name, "no name that TFDS knows"))
  prefix = prefix_of(source)
  listing = KINDS[prefix](source.removeprefix(prefix), options or Options())
  builder = OwnData(
    name=name,
    listing=listing,
    description=f"Imported from {source} by vit-jax prepare.",
    data_dir=data_dir,
    file_format=file_format,
    record_filter=RecordFilter(say, max_pixels),
  )
  if tfds_source.is_prepared(builder) or epath.Path(builder.data_dir).exists():
    expected = f"a new name, or that you remove {builder.data_dir}"
    raise ValueError(unexpected("--name", name, expected))
  _check_is_local(builder)
  names = listing.class_names
  some = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
  for split, (count, _) in listing.splits.items():
    say(f"{split}: {count:,} records found")
  what = "classes"
  if listing.is_regression:
    what = f"number{'s' * (len(names) > 1)} to predict"
  say(f"{len(names):,} {what}: {some}")
  for remark in listing.remarks:
    say(remark)
  if listing.is_multilabel:
    say("an image has any number of them: config.objective.loss=sigmoid")
  if listing.is_regression:
    say(f"to learn them: --config=folder:path={name}")
  _write(builder, say, tfds.download.DownloadConfig())
  return _finished(builder, say)


def _write(builder, say: Say, config: tfds.download.DownloadConfig) -> None:
  """Writes a data set.

  Raises:
    ValueError: The disk is full.
  """
  say(f"writing {builder.data_dir} ...")
  try:
    # TFDS's own output knows neither the number of records nor their names.
    with contextlib.redirect_stdout(None):
      tfds.disable_progress_bar()
      builder.download_and_prepare(download_config=config)
  except (OSError, RuntimeError) as e:
    # Writers of records raise other errors with the text of OSError.
    if os.strerror(errno.ENOSPC) in str(e):
      got = f"{builder.data_dir_root}, whose disk is full"
      raise ValueError(unexpected("--data_dir", got, "free space")) from None
    raise


def _finished(builder, say: Say) -> Prepared:
  errors = []
  if isinstance(builder, ImageBuilder):
    records = builder.record_filter
    errors = records.left_out
    for name, count in sorted(records.converted.items()):
      say(f"{count:,} images were {name} and are stored as PNG")
    if records.num_without_class:
      say(f"{records.num_without_class:,} images have none of the classes")
  if errors:
    file = epath.Path(builder.data_dir) / LEFT_OUT
    lines = [f"{key}: {what}" for key, what in errors]
    file.write_text("\n".join(lines) + "\n")
    say(f"left out, all listed in {file}:")
    for line in lines[:_SHOWN]:
      say(f"  {line}")
    if len(lines) > _SHOWN:
      say(f"  and {len(lines) - _SHOWN:,} more")
  return _prepared(builder, len(errors))


def _prepared(builder, left_out: int) -> Prepared:
  label = tfds_source.find_label(builder.info.features)
  return Prepared(
    folder=str(builder.data_dir),
    splits={k: v.num_examples for k, v in builder.info.splits.items()},
    num_classes=len(label.names) if label else None,
    left_out=left_out,
    is_regression=bool(label) and label.is_regression,
  )


def main(args: argparse.Namespace) -> None:
  """Prepares a data set; prints its sizes and what was left out.

  Args:
    args: The command line of `vit-jax prepare`.
  """
  # `_write` redirects sys.stdout; these lines are printed all the same.
  say = functools.partial(print, file=sys.stdout, flush=True)
  try:
    done = _run(args, say)
  except (ValueError, OSError, AssertionError) as e:  # TFDS asserts
    sys.exit(str(e))
  for split, count in done.splits.items():
    say(f"{split:<12}{count:>12,} records")
  if done.num_classes is not None:
    what = "numbers" if done.is_regression else "classes"
    say(f"{what:<12}{done.num_classes:>12,}")
  say(f"{'left out':<12}{done.left_out:>12,}")
  name = args.name or args.source
  where = ""
  if args.data_dir:
    where = f" --config.data.data_dir={shlex.quote(args.data_dir)}"
  if args.max_pixels:
    where += f" --config.data.max_pixels={args.max_pixels}"
  say(f"in {done.folder}; to use it: --config.data.dataset={name}{where}")


def _run(args: argparse.Namespace, say: Say) -> Prepared:
  """Imports a user's source, or prepares a data set of TFDS."""
  from vit_jax.finetune.data.imports import KINDS, Options
  from vit_jax.finetune.data.imports.listing import check_unused, read_names

  prefix = prefix_of(args.source)
  if prefix and prefix not in KINDS:
    expected = f"a name of TFDS, or one of {', '.join(KINDS)} with a path"
    raise ValueError(unexpected("SOURCE", repr(args.source), expected))
  unread = ONLY_IMPORTS
  if prefix:
    numbers = ("numbers",) if prefix not in WITH_NUMBERS else ()
    unread = ("manual_dir", *numbers)
  for option in unread:
    if value := getattr(args, option):
      expected = f"none for {args.source}"
      raise ValueError(unexpected(f"--{option}", value, expected))
  if prefix:
    options = Options(
      _splits_of(args.splits or ""),
      args.image,
      args.label,
      read_names(args.classes) if args.classes else None,
      tuple(c.strip() for c in args.numbers.split(",")) if args.numbers else (),
    )
    if args.numbers:
      check_unused(options, ("label", "classes"), "--numbers")
    return import_source(
      args.source,
      args.name or "",
      args.data_dir,
      options,
      say,
      args.file_format,
      args.max_pixels or MAX_PIXELS,
    )
  return prepare(
    args.source, args.data_dir, args.manual_dir, say, args.file_format
  )


def _splits_of(text: str) -> dict[str, str | None]:
  """Returns split -> pattern of file names, or None, from --splits."""
  splits = {}
  for part in text.split(",") if text else ():
    name, _, pattern = part.strip().partition("=")
    if name in splits:
      raise ValueError(unexpected("--splits", text, f"{name} once"))
    splits[name] = pattern or None
  return splits

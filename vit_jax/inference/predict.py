"""Classifies images, or writes their features: `vit-jax predict`.

The model, its preprocessing and its class names are read from the checkpoint.
Results go to the standard output one by one, all other lines to the standard
error.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from vit_jax import class_names, weights
from vit_jax.data.images import LIMIT_OPTION
from vit_jax.data.preprocessing import with_decoding
from vit_jax.distributed import processes
from vit_jax.inference import output_formats as formats
from vit_jax.inference import streaming
from vit_jax.inference.pretrained import Answer, FeatureRow, Pretrained, load
from vit_jax.models import precision
from vit_jax.options import unexpected
from vit_jax.paths import printable
from vit_jax.writers.console import note

Row = TypeVar("Row", Answer, FeatureRow)

LOG_SECONDS = 30.0  # between lines about the progress, without a terminal


def run(args: argparse.Namespace) -> int:
  """Classifies the images and prints the results.

  Returns:
    The exit status.

  Raises:
    FileNotFoundError: The checkpoint does not exist.
    ValueError: The checkpoint cannot be read, or lacks the head, the attention
      or the layer that the arguments need.
    ImportError: The package that writes the features is not installed.
    OSError: A picture or the file of features cannot be written.
  """
  if args.features is not None:
    formats.check_features(args.features)
  vit = load(
    args.checkpoint,
    image_size=args.image_size,
    mean=args.mean,
    background=args.background,
    verbose=False,
  )
  config = precision.with_fastest_dtype(vit.config)
  if args.dtype is not None:
    config = dataclasses.replace(config, dtype=args.dtype)
  ops = vit.ops
  if args.max_pixels is not None:
    ops = with_decoding(ops, max_pixels=args.max_pixels)
  vit = dataclasses.replace(vit, config=config, ops=ops)
  note(_description(args.checkpoint, vit))
  images: Iterable[streaming.Named] = streaming.find(args.images)
  if args.features is not None:
    return _write_features(args, vit, images)
  if args.attention:
    images = _refuse_own_folder(images, args.out_dir)
  images, total = _counted(args, images)
  answers = vit.predictions(
    images, args.top, batch_size=args.batch_size, attention=args.attention
  )
  write = _writer(args, vit, images if total else [])
  names = formats.FileNames(args.out_dir)
  num_read, num_bad = 0, 0
  for answer in _shown(answers, total):
    if answer.error is not None:
      num_bad += 1
      continue
    num_read += 1
    picture = None
    if answer.attention is not None:
      picture = names.of(answer.name)
      _write_picture(picture, answer)
    write(answer, picture)
  if num_bad:
    note(f"{num_read:,} images classified, {num_bad:,} could not be read")
  return 0 if num_read else 1


def _counted(
  args: argparse.Namespace, images: Iterable[streaming.Named]
) -> tuple[Iterable[streaming.Named], int | None]:
  """Returns the images and their number; None if standard input lists them."""
  if streaming.STANDARD_INPUT in args.images:
    return images, None
  images = list(images)  # names only, to know how many there are
  return images, len(images)


def _write_features(
  args: argparse.Namespace, vit: Pretrained, images: Iterable[streaming.Named]
) -> int:
  """Writes the features of the images; returns the exit status.

  Raises:
    ValueError: There is no such layer.
    OSError: The file cannot be written.
  """
  images, total = _counted(args, images)
  rows = vit.feature_rows(images, args.layer, batch_size=args.batch_size)
  read, num_bad = [], 0
  for row in _shown(rows, total):
    if row.error is None:
      read.append(row)
    num_bad += row.error is not None
  if num_bad:
    note(f"{len(read):,} images read, {num_bad:,} could not be read")
  if not read:
    return 1
  features = np.stack([row.features for row in read])
  formats.write_features(args.features, [row.name for row in read], features)
  note(
    f"{args.features}: {args.layer} of {len(read):,} images,"
    f" {features.dtype} {list(features.shape)}"
  )
  return 0


def _refuse_own_folder(
  images: Iterable[streaming.Named], folder: str
) -> Iterator[streaming.Named]:
  """Yields the images; refuses images in the folder of the pictures.

  A picture has the name of its image, and would overwrite it.
  """
  target = os.path.realpath(folder)
  for image in images:
    is_file = isinstance(image.image, str)  # not of standard input
    if is_file and os.path.realpath(os.path.dirname(image.name)) == target:
      expected = f"another folder than that of {image.name}"
      raise ValueError(unexpected("--out_dir", repr(folder), expected))
    yield image


def _description(path: str, vit: Pretrained) -> str:
  """Returns a line about the model, and a report if loading changed weights."""
  height, width = vit.image_size
  names = "" if vit.class_names else ", without names"
  numbers = "number" if vit.num_classes == 1 else "numbers"
  what = numbers if vit.is_regression else "classes"
  lines = [
    f"{path}: {vit.config.variant}, {height} x {width} pixels,"
    f" {vit.num_classes:,} {what}{names}, {vit.ops}, {vit.config.dtype}"
  ]
  if vit.report.resized or vit.report.ignored or vit.report.notes:
    lines.append(weights.format_report(vit.report))
  return "\n".join(lines)


def _writer(
  args: argparse.Namespace, vit: Pretrained, images: list
) -> formats.Write:
  """Returns the function that prints an answer in the requested form."""
  if args.json:
    return formats.as_json(sys.stdout)
  if args.csv:
    return formats.as_csv(sys.stdout, args.attention, vit.is_regression)
  names = vit.class_names and map(class_names.readable, vit.class_names)
  return formats.as_table(
    sys.stdout, [named.name for named in images], names, vit.is_regression
  )


def _shown(answers: Iterator[Row], total: int | None) -> Iterator[Row]:
  """Yields the answers; prints the progress and the unreadable images.

  The progress is a bar if the standard error is a terminal, the standard output
  is not, and the number of images is known. Otherwise it is a line every
  `LOG_SECONDS`.
  """
  began = logged = time.monotonic()
  # None: disabled where stderr is no terminal.
  is_disabled = None if total and not sys.stdout.isatty() else True
  with tqdm(
    total=total, unit="img", dynamic_ncols=True, disable=is_disabled
  ) as bar:
    for count, answer in enumerate(answers, 1):
      if answer.error is not None:
        name = printable(answer.name)
        text = str(answer.error).replace(LIMIT_OPTION, "--max_pixels")
        note(f"cannot read {name}: {text}")
      yield answer
      bar.update()
      now = time.monotonic()
      is_due = bar.disable and now - logged > LOG_SECONDS
      if is_due and not sys.stdout.isatty():
        logged = now
        count_text = f"{count:,} of {total:,}" if total else f"{count:,}"
        text = f"{count_text} images, {count / (now - began):,.1f} img/s"
        note(text)


def _write_picture(path: pathlib.Path, answer: Answer) -> None:
  from vit_jax.inference import overlay  # matplotlib takes a tenth of a second

  path.parent.mkdir(parents=True, exist_ok=True)
  overlay.beside(answer.pixels, answer.attention).save(path)


def main(args: argparse.Namespace) -> None:
  """Classifies the images; ends the process with the exit status."""
  processes.refuse_several_hosts()
  # Hides Pillow's warnings about large images and odd metadata.
  warnings.filterwarnings("ignore", module="PIL")
  # Characters that the terminal's encoding lacks are escaped.
  sys.stdout.reconfigure(errors="backslashreplace")
  sys.stderr.reconfigure(errors="backslashreplace")
  try:
    status = run(args)
    sys.stdout.flush()
  except BrokenPipeError:  # for example with `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 1
  except (OSError, ValueError, ImportError) as e:
    text = f"{e.filename}: {e.strerror}" if getattr(e, "filename", None) else e
    sys.exit(f"vit-jax predict: {text}")
  except KeyboardInterrupt:
    status = 130
  sys.exit(status)

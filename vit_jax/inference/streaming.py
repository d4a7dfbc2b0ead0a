"""Lists, decodes and resizes the images of a command line, in order.

Threads decode while the model computes. The number of images in memory is
limited, so that a folder may have any size.
"""

import collections
import concurrent.futures
import functools
import glob
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import images, pixels
from vit_jax.data.preprocessing import decoding
from vit_jax.paths import is_by_program

STANDARD_INPUT = "-"
PEEKED = 64  # bytes of the standard input that tell an image from a list


class Named(NamedTuple):
  """An image that is not read yet.

  name: Path of the image; "-" for standard input.
  image: Argument of `images.read`; or an error, if there is no image.
  """

  name: str
  image: Any


class Row(NamedTuple):
  """An image that was read, or an error.

  name: See `Named`.
  pixels: Preprocessed pixels, uint8 [h, w, c]; None after an error.
  error: Why the image could not be read; None: it was read.
  """

  name: str
  pixels: np.ndarray | None
  error: Exception | None


def find(arguments: Iterable[str]) -> Iterator[Named]:
  """Yields the images that the arguments of a command line name.

  Args:
    arguments: Files, folders, globs (** matches any depth), or "-". A folder
      means all images in it at any depth, by name, without hidden files, links
      to folders, and folders that programs make (`__MACOSX`, `@eaDir`). "-" is
      the standard input: an image if its first 64 bytes have a NUL byte;
      otherwise a list of files, folders and globs, one per line.

  Yields:
    Images; an error for a folder or a glob without images.
  """
  for word in arguments:
    if word == STANDARD_INPUT:
      yield from _from_stdin()
    elif os.path.isdir(word):
      yield from _in_folder(word)
    elif glob.has_magic(word) and not os.path.exists(word):
      yield from _of_glob(word)
    else:
      yield Named(word, word)


def _from_stdin() -> Iterator[Named]:
  is_empty = True
  stdin = sys.stdin.buffer if sys.stdin else None  # None: it is closed
  if stdin is not None and b"\0" in stdin.peek(PEEKED)[:PEEKED]:
    yield Named(STANDARD_INPUT, stdin.read())
    return
  for line in stdin or ():
    if word := os.fsdecode(line.rstrip(b"\r\n")):
      is_empty = False
      yield from find([word])
  if is_empty:
    error = ValueError("got nothing, expected an image, or files, one a line.")
    yield Named(STANDARD_INPUT, error)


def _in_folder(folder: str) -> Iterator[Named]:
  is_empty = True
  for parent, folders, files in os.walk(folder):
    folders[:] = sorted(f for f in folders if not is_by_program(f))
    for file in sorted(files):
      if file.lower().endswith(images.SUFFIXES) and not file.startswith("."):
        is_empty = False
        path = os.path.join(parent, file)
        yield Named(path, path)
  if is_empty:
    kinds = " ".join(images.SUFFIXES)
    error = ValueError(f"got a folder without images, expected {kinds}.")
    yield Named(folder, error)


def _of_glob(word: str) -> Iterator[Named]:
  paths = sorted(glob.glob(word, recursive=True))
  if not paths:
    error = FileNotFoundError("got a glob that matches no file.")
    yield Named(word, error)
  for path in paths:
    # "**" matches folders, too; their files are matched separately.
    if not os.path.isdir(path):
      yield Named(path, path)
    elif "**" not in word:
      yield from _in_folder(path)


def read_all(
  named_images: Iterable[Named],
  ops: str,
  *,
  ahead: int,
) -> Iterator[Row]:
  """Yields the images' pixels in order, while threads read the next ones.

  Args:
    named_images: The images; may be an endless iterator.
    ops: Preprocessing without randomness, see `pixels.apply`.
    ahead: Largest number of images that are read in advance.
  """
  read = functools.partial(_read, ops=ops)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "read") as pool:
    waiting: collections.deque[Callable[[], Row]] = collections.deque()
    named_images = iter(named_images)
    try:
      for named in itertools.islice(named_images, ahead):
        waiting.append(_submitted(pool, read, named))
      while waiting:
        row = waiting.popleft()()
        for named in itertools.islice(named_images, 1):
          waiting.append(_submitted(pool, read, named))
        yield row
    finally:
      pool.shutdown(wait=False, cancel_futures=True)


def _submitted(
  pool: concurrent.futures.Executor, read: Callable[[Named], Row], named: Named
) -> Callable[[], Row]:
  """Starts to read an image; returns a function that waits for it."""
  if isinstance(named.image, str | os.PathLike | bytes):
    return pool.submit(read, named).result
  # Two threads cannot read a PIL image that is in the list twice.
  row = read(named)
  return lambda: row


def _read(named: Named, ops: str) -> Row:
  if isinstance(named.image, Exception):
    return Row(named.name, None, named.image)
  try:
    image = images.read(named.image, **decoding(ops))
    return Row(named.name, pixels.apply(image, ops), None)
  except (FileNotFoundError, ValueError) as e:
    # The frames of a traceback would keep the bytes of the file in memory.
    return Row(named.name, None, e.with_traceback(None))

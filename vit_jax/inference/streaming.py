"""Images that a command line names: found, decoded and resized, in order.

Threads decode while the model computes; the number of images in memory is
bounded, so that a folder of any size can pass.
"""

import collections
import concurrent.futures
import functools
import glob
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config.preprocessing import turns_upright
from vit_jax.data import images, pixels

STANDARD_INPUT = "-"
PEEKED = 64  # bytes


class Named(NamedTuple):
  """An image that has a name, not read yet.

  name: Its path; "-" for standard input.
  image: What `images.read` takes, or the error that stands in its place.
  """

  name: str
  image: Any


class Row(NamedTuple):
  """An image that was read, or could not be.

  name: See `Named`.
  pixels: uint8 [h, w, 3] as the model gets them; None: it could not be read.
  error: Why not; None: it was.
  """

  name: str
  pixels: np.ndarray | None
  error: Exception | None


def find(
  words: Iterable[str], stdin: io.BufferedIOBase | None
) -> Iterator[Named]:
  """Yields the images that the words of a command line stand for.

  Args:
    words: Files; folders, of which all images are found, those of folders
      within it too, in the order of their names, without hidden ones and
      without links to folders; globs, with ** for any depth; or "-".
    stdin: Read for "-": an image, or else a list of files, folders and globs,
      one a line. A NUL byte in its first 64, which no list has, tells. None: it
      is closed.

  Yields:
    An error in place of an image for a folder or a glob without images, and for
    folders that cannot be opened.
  """
  for word in words:
    if word == STANDARD_INPUT:
      yield from _from_stdin(stdin)
    elif os.path.isdir(word):
      yield from _in_folder(word)
    elif glob.has_magic(word) and not os.path.exists(word):
      yield from _of_glob(word)
    else:
      yield Named(word, word)


def _from_stdin(stdin: io.BufferedIOBase | None) -> Iterator[Named]:
  stdin = io.BytesIO() if stdin is None else stdin
  reader = stdin if hasattr(stdin, "peek") else io.BufferedReader(stdin)
  begin = reader.peek(PEEKED)[:PEEKED]
  if b"\0" in begin or begin.startswith(b"GIF8"):
    yield Named(STANDARD_INPUT, reader.read())
    return
  is_empty = True
  for line in reader:
    if word := os.fsdecode(line.rstrip(b"\r\n")):
      is_empty = False
      if word == STANDARD_INPUT:  # a second time; it is being read
        yield Named(word, word)
      else:
        yield from find([word], stdin)
  if is_empty:
    error = ValueError("got nothing, expected an image, or files, one a line.")
    yield Named(STANDARD_INPUT, error)


def _in_folder(folder: str) -> Iterator[Named]:
  is_empty, closed = True, []
  for parent, folders, files in os.walk(folder, onerror=closed.append):
    folders[:] = sorted(f for f in folders if not f.startswith("."))
    for file in sorted(files):
      if file.lower().endswith(images.SUFFIXES) and not file.startswith("."):
        is_empty = False
        path = os.path.join(parent, file)
        yield Named(path, path)
  for e in closed:
    error = ValueError(f"got a folder that cannot be opened: {e.strerror}.")
    yield Named(e.filename, error)
  if is_empty and not closed:
    kinds = " ".join(images.SUFFIXES)
    yield Named(
      folder, ValueError(f"got a folder without images, expected {kinds}.")
    )


def _of_glob(word: str) -> Iterator[Named]:
  paths = sorted(glob.glob(word, recursive=True))
  if not paths:
    error = FileNotFoundError("got a glob that matches no file.")
    yield Named(word, error)
  for path in paths:
    # "**" also matches folders, whose files it matches one by one.
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
  """Yields the images' pixels in order, while a thread for each
  processor reads those to come.

  Args:
    named_images: The images, drawn from as they are read.
    ops: Preprocessing without randomness, see `pixels.apply`.
    ahead: Images that are read before they are asked for, at most.
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


def _submitted(pool, read, named: Named) -> Callable[[], Row]:
  """Returns what waits for the image."""
  if isinstance(named.image, str | os.PathLike | bytes):
    return pool.submit(read, named).result
  # A PIL image may be in the list twice, and cannot be read by two threads.
  row = read(named)
  return lambda: row


def _read(named: Named, ops: str) -> Row:
  try:
    if isinstance(named.image, Exception):
      raise named.image
    image = images.read(named.image, exif=turns_upright(ops))
    return Row(named.name, pixels.apply(image, ops), None)
  except FileNotFoundError as e:
    error = FileNotFoundError(*e.args)
  except ValueError as e:
    error = ValueError(str(e))
  return Row(named.name, None, error)  # a new one: a traceback holds the file

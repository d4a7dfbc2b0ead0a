"""Large images of a folder, shrunk once: config.data.shrink.

A photograph of 12 megapixels takes twenty times as long to decode as one of 512
pixels, in every epoch. Before the first step, each image whose shorter side is
at least `LARGE` times `side` is decoded (a JPEG with its own scaling), resized
to a shorter side of `side`, and stored as a JPEG in the user's cache, where all
runs find it. Other images, transparent ones and broken ones are read as they
are, so that labels, order and errors do not change.

The pixels of a record are a function of its file and of config.data: an image
that is not in the cache, because it is too large or was deleted, is shrunk
whenever it is read. The name of a cache file is a hash of the image's path,
size and time of change, as in make and rsync. (A digest of the contents would
read every large file at every start.)
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable

from PIL import Image
from tqdm import tqdm

from vit_jax.data import images, preprocessing
from vit_jax.data.folder import FolderSource
from vit_jax.data.source import UNAVAILABLE_ERRNOS, Record, Source
from vit_jax.data.subsets import Subset
from vit_jax.data.tf_cpu import tf
from vit_jax.paths import cache_folder

CACHE = "shrunk"  # folder of the user's cache
LIMIT = 20 * 2**30  # bytes of the cache, and at most half of what is free
LARGE = 2  # times the side
# Bits of a pixel: no photograph has fewer, so smaller files are not opened.
_FEWEST_BITS = 0.25
_LOOKED_AT = 64  # images that tell whether a folder has large ones
_QUALITY = 95
_END = b"\xff\xd9"  # of a JPEG


def shrunk(
  source: Source,
  side: int,
  ops: str,
  on_image: Callable[[], None] = lambda: None,
) -> Source:
  """Returns a source whose large images have a shorter side of `side`.

  It reads the sizes of a few images. Only if one of them is large, all large
  ones are shrunk now, with a progress bar.

  Args:
    source: The source; returned unchanged unless it is a folder's.
    side: Pixels; with 0 the source is returned unchanged.
    ops: Preprocessing, whose decoding options are used for shrinking.
    on_image: Called for each image that is shrunk now.
  """
  if isinstance(source, Subset):
    base = shrunk(source.base, side, ops, on_image)
    return dataclasses.replace(source, base=base)
  if not side or not isinstance(source, FolderSource):
    return source
  step = max(1, source.num_examples // _LOOKED_AT)
  decoding = preprocessing.decoding(ops)
  images.allow(decoding["max_pixels"])
  if not _has_large(source.paths[::step], side):
    return source
  fields = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
  options = {key: decoding[key] for key in ("exif", "max_pixels")}
  made = ShrunkFolder(**fields, side=side, options=options)
  made.fill(on_image)
  return made


def shrunk_file(
  data: bytes, side: int, *, exif: bool, max_pixels: int
) -> bytes | None:
  """Returns a smaller image as a JPEG; None to read the image as it is.

  Args:
    data: Bytes of an image file.
    side: Pixels of the shorter side.
    exif: Whether the image is turned by its EXIF orientation.
    max_pixels: See `images.read`.
  """
  try:
    if not data.endswith(_END):
      images.turn(data, max_pixels)  # raises where the file is cut off
    with Image.open(io.BytesIO(data), formats=images.FORMATS) as image:
      images.check_size(image, max_pixels)
      if min(image.size) < LARGE * side or image.has_transparency_data:
        return None
      size = _size(image.size, side)
      image.draft(None, size)  # a JPEG is decoded at 1/2, 1/4 or 1/8
      pixels = images.read_with_alpha(image, exif=exif, max_pixels=max_pixels)
    if pixels.shape[-1] != 3:
      return None
    whole = Image.fromarray(pixels)
    is_turned = (whole.width > whole.height) != (size[0] > size[1])
    size = size[::-1] if is_turned else size
    file = io.BytesIO()
    whole.resize(size, Image.Resampling.BICUBIC).save(
      file, "jpeg", quality=_QUALITY
    )
    return file.getvalue()
  except images.BROKEN:
    return None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShrunkFolder(FolderSource):
  """Images of a folder, the large ones shrunk.

  Attributes:
    side: Pixels of the shorter side of shrunk images.
    options: Further arguments of `shrunk_file`.
  """

  side: int
  options: dict[str, object]
  # Records that are shrunk; record in the cache -> its bytes; free bytes.
  _large: set[int] = dataclasses.field(default_factory=set, repr=False)
  _stored: dict[int, int] = dataclasses.field(default_factory=dict, repr=False)
  _space: list[int] = dataclasses.field(default_factory=list, repr=False)
  _lock: threading.Lock = dataclasses.field(
    default_factory=threading.Lock, repr=False
  )

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    _, label = self._file(raw)
    image = tf.numpy_function(
      lambda index: self.read(int(index)),
      [raw["index"]],
      tf.string,
      stateful=False,
    )
    image = tf.ensure_shape(image, [])
    return {"image": image, "label": label, "index": raw["index"]}

  def stamp(self) -> str:
    """See `Source`."""
    return f"{super().stamp()} {self.side} {self.options}"

  def note(self) -> str:
    """See `Source`: says what is shrunk, and where it is."""
    num, size = len(self._stored), sum(self._stored.values()) / 2**20
    text = (
      f"{len(self._large):,} large images are read at a shorter side of"
      f" {self.side} pixels (config.data.shrink), from {cache_folder(CACHE)}"
      f" ({size:,.0f} MiB; vit-jax cache --remove={CACHE} removes it)"
    )
    if rest := len(self._large) - num:
      text += (
        f". {rest:,} of them do not fit there ({LIMIT / 2**30:.0f} GiB, or"
        " half of the free space) and are shrunk again in every epoch"
      )
    return " ".join(filter(None, (self.remark, f"{text}.")))

  def fill(self, on_image: Callable[[], None]) -> None:
    """Shrinks all large images that are not in the cache, on all cores."""
    maybe = []
    for index, path in enumerate(self.paths):
      if (stored := _size_of(self._cached(index))) is not None:
        self._large.add(index)
        self._stored[index] = stored
      elif _may_be_large(path, self.side):
        maybe.append(index)
    self._space.append(_free_space())
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
      are_large = pool.map(self._is_large, maybe)
      missing = [i for i, large in zip(maybe, are_large, strict=True) if large]
      if self._space[0] <= 0:  # they are shrunk whenever they are read
        self._large.update(missing)
        missing = []
      if not missing:
        return
      print(
        f"shrinks     {len(missing):,} of {self.num_examples:,} images, once,"
        f" to a shorter side of {self.side} pixels",
        file=sys.stderr,
        flush=True,
      )
      done = pool.map(self._store, missing)
      # No bar where it would fill a file.
      for _ in tqdm(done, total=len(missing), unit="image", disable=None):
        on_image()
    finally:
      pool.shutdown(cancel_futures=True)

  def read(self, index: int) -> bytes:
    """Returns the file of a record: the shrunk one, or the image itself.

    Raises:
      OSError: The image cannot be read.
    """
    if index not in self._large:
      return _contents(self.paths[index])
    with contextlib.suppress(OSError):
      data = _contents(self._cached(index))
      if data.endswith(_END):  # not one that a crash of the machine cut off
        return data
    return self._shrink(index) or _contents(self.paths[index])

  def _is_large(self, index: int) -> bool:
    try:
      return _is_large(self.paths[index], self.side)
    except OSError as e:  # the run reports it, or reads it when the store can
      if e.errno in UNAVAILABLE_ERRNOS:
        self._large.add(index)
      return False

  def _store(self, index: int) -> None:
    try:
      if self._space[0] <= 0 or self._shrink(index):
        self._large.add(index)
    except OSError as e:  # as above
      if e.errno in UNAVAILABLE_ERRNOS:
        self._large.add(index)

  def _shrink(self, index: int) -> bytes | None:
    """Returns the shrunk file; it is added to the cache if there is room."""
    data = _contents(self.paths[index])
    small = shrunk_file(data, self.side, **self.options)
    if small is None:
      return None
    with self._lock:
      has_room = index in self._stored or len(small) <= self._space[0]
      if not has_room:
        self._space[0] = 0
      elif index not in self._stored:
        self._space[0] -= len(small)
        self._stored[index] = len(small)
    if has_room:
      try:
        _write(self._cached(index), small)
      except OSError:  # full, or not ours to write
        self._space[0] = 0
        self._stored.pop(index, None)
    return small

  @functools.cached_property
  def _cache(self) -> pathlib.Path:
    return cache_folder(CACHE)

  def _cached(self, index: int) -> str:
    """Returns the path of a shrunk image in the cache."""
    path = os.fsencode(self.paths[index])
    try:
      stat = os.stat(path)
    except OSError:  # the run reports it
      return os.path.join(self._cache, "none")
    key = f"{self.side} {self.options} {stat.st_size} {stat.st_mtime_ns} "
    name = hashlib.sha256(key.encode() + path).hexdigest()[:32]
    return os.path.join(self._cache, name[:2], f"{name[2:]}.jpg")


def _size(size: tuple[int, int], side: int) -> tuple[int, int]:
  """Returns the (width, height) with a shorter side of `side`."""
  ratio = side / min(size)
  return tuple(max(side, round(pixels * ratio)) for pixels in size)


def _may_be_large(path: str, side: int) -> bool:
  """Whether a file has as many bytes as a large image."""
  size = _size_of(path)
  return size is not None and size >= (LARGE * side) ** 2 * _FEWEST_BITS / 8


def _is_large(path: str, side: int) -> bool:
  """Whether an image is large, by its header, and opaque; False without one.

  Raises:
    OSError: The file cannot be read.
  """
  if not _may_be_large(path, side):
    return False
  try:
    with Image.open(path, formats=images.FORMATS) as image:
      return min(image.size) >= LARGE * side and not image.has_transparency_data
  except images.BROKEN as e:
    if getattr(e, "errno", None) is not None:
      raise
    return False


def _has_large(paths: Iterable[str], side: int) -> bool:
  for path in paths:
    with contextlib.suppress(OSError):
      if _is_large(path, side):
        return True
  return False


def _size_of(path: str) -> int | None:
  try:
    return os.stat(path).st_size
  except OSError:
    return None


def _contents(path: str) -> bytes:
  with open(path, "rb") as file:
    return file.read()


def _write(path: str, data: bytes) -> None:
  """Writes a file; others see all of it or nothing."""
  folder = os.path.dirname(path)
  os.makedirs(folder, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
    try:
      file.write(data)
      file.flush()
      os.replace(file.name, path)
    except OSError:
      os.unlink(file.name)
      raise


def _free_space() -> int:
  """Returns how many bytes may be added to the cache."""
  folder = cache_folder(CACHE)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    used = sum(f.stat().st_size for f in folder.rglob("*.jpg"))
    return min(LIMIT - used, shutil.disk_usage(folder).free // 2)
  except OSError:  # no home, or one that others write
    return 0

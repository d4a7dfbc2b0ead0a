"""Draws letters and symbols: numpy, scipy, Pillow and matplotlib's fonts.

No TensorFlow here, and no import from this package: `glyphs.py` starts this
file as a script, once per worker process, and reads raw images from its
standard output.

How an image is made:

1. A *field* per (character, font, style), drawn once and cached: the distance
   in pixels of every point to the path of the pen. For the style "outline" the
   path is the printed shape itself (negative inside it); for "pen" it is the
   shape thinned to one-pixel lines, so that serifs and contrast disappear and
   the rest can be written with a pen of any width.
2. The field is sampled through a random affine map and a smooth random warp,
   on a grid twice as fine as the image, and compared with a random distance:
   that is half the stroke width, with a soft edge.
3. The ink is cropped, fitted into a random box of the image (so nothing is
   ever cut off) and, for most images, scaled down to 8 to 16 pixels, mostly
   few, and up again with random filters: that is the blur of a small scan.

Every random number of image `index` comes from (seed, split, index).
"""

import collections.abc
import functools
import math
import pathlib
import sys

import numpy as np
import scipy  # whose ndimage is imported on its first use
from PIL import Image, ImageDraw, ImageFont, ImageOps

# Latin lower-case letters only where they are not smaller capitals (c, k, o, p,
# s, ... are): images are fitted into a box, so the size of a letter says
# nothing. For the same reason no Greek or Cyrillic letter that looks like a
# Latin one, and no Cyrillic Ze, which looks like the digit three.
CHARACTERS = (
  "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
  "abdefghmnqrt"
  "ΓΔΘΠΣΦΨΩγδελξσω"
  "БДЖИЧШЭЮЯ"
  "ԱԽՃ"
  "აბდლმფ"
  "אגטלמשע"
  "جسع"
  "&@%?$€£§∞∂≠"
)

SPLITS = ("train", "validation")

# Upright and slanted, thin and bold, with and without serifs.
_FONTS = (
  "DejaVuSans",
  "DejaVuSans-Bold",
  "DejaVuSans-Oblique",
  "DejaVuSans-BoldOblique",
  "DejaVuSansMono",
  "DejaVuSansMono-Oblique",
  "DejaVuSerif",
  "DejaVuSerif-Italic",
  "DejaVuSerif-Bold",
  "STIXGeneral",
  "STIXGeneralItalic",
  "STIXGeneralBol",
  "cmr10",
  "cmss10",
  "cmti10",
  "cmtt10",
)
_FIELD = 64  # Side of a cached field, in pixels ...
_INK = 40  # ... and the longer side of the shape in its middle.
CHUNK = 64  # Images that a worker draws before it writes them.


def font_directory() -> pathlib.Path:
  """Returns the folder of the TrueType fonts that matplotlib ships."""
  import matplotlib  # Here, because it takes 0.1 s.

  return pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@functools.cache
def _codepoints(font: str) -> frozenset[int]:
  from matplotlib import ft2font

  path = font_directory() / f"{font}.ttf"
  return frozenset(ft2font.FT2Font(str(path)).get_charmap())


@functools.cache
def fonts_with(character: str) -> tuple[str, ...]:
  """Returns the fonts whose character map has `character`, in a fixed order.

  The Computer Modern fonts count only for Latin letters: their other slots
  follow TeX's encoding, not Unicode.
  """
  is_latin = character.isascii() and character.isalpha()
  return tuple(
    font
    for font in _FONTS
    if ord(character) in _codepoints(font)
    and (is_latin or not font.startswith("cm"))
  )


@functools.cache
def _font(name: str) -> ImageFont.FreeTypeFont:
  # The basic layout engine draws the code point as it is: no shaping, so an
  # Arabic letter keeps its isolated form, with or without libraqm.
  return ImageFont.truetype(
    str(font_directory() / f"{name}.ttf"),
    size=4 * _INK,
    layout_engine=ImageFont.Layout.BASIC,
  )


@functools.cache
def shape(character: str, font: str) -> np.ndarray:
  """Returns the printed shape, centred: bool[64, 64], longer side 40."""
  face = _font(font)
  left, top, right, bottom = face.getbbox(character)
  image = Image.new("L", (right - left, bottom - top))
  ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=face)
  image = image.crop(image.getbbox())
  scale = _INK / max(image.size)
  size = [max(2, round(side * scale)) for side in image.size]
  image = image.resize(size, Image.Resampling.BOX)
  canvas = Image.new("L", (_FIELD, _FIELD))
  canvas.paste(image, tuple((_FIELD - side) // 2 for side in size))
  return np.asarray(canvas) > 127


@functools.cache
def _thinning_tables() -> tuple[np.ndarray, np.ndarray]:
  """Returns, for each code of eight neighbours, whether a pixel is deleted.

  Source: Zhang and Suen, A fast parallel algorithm for thinning digital
  patterns, CACM 27(3), 1984. Neighbours clockwise from the one above.
  """
  tables = np.zeros((2, 256), bool)
  for code in range(256):
    p = [code >> bit & 1 for bit in range(8)]
    rises = sum(p[i] < p[(i + 1) % 8] for i in range(8))
    if not 2 <= sum(p) <= 6 or rises != 1:
      continue
    north, east, south, west = p[::2]
    tables[0, code] = not (north & east & south or east & south & west)
    tables[1, code] = not (north & east & west or north & south & west)
  return tables[0], tables[1]


def _thin(ink: np.ndarray) -> np.ndarray:
  """Thins a shape that touches no border to lines one pixel wide."""
  steps = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
  ink = ink.copy()
  changed = True
  while changed:
    changed = False
    for table in _thinning_tables():
      code = np.zeros(ink.shape, np.uint8)
      for bit, step in enumerate(steps):
        code |= np.roll(ink, (-step[0], -step[1]), (0, 1)).view(np.uint8) << bit
      doomed = ink & table[code]
      changed |= bool(doomed.any())
      ink &= ~doomed
  return ink


@functools.cache
def _field(character: str, font: str, is_pen: bool) -> np.ndarray:
  """Returns the distance to the pen's path in pixels: float32[64, 64]."""
  ink = shape(character, font)
  if is_pen:
    field = scipy.ndimage.distance_transform_edt(~_thin(ink))
  else:
    outside = scipy.ndimage.distance_transform_edt(~ink)
    inside = scipy.ndimage.distance_transform_edt(ink)
    # Both distances are at least one pixel, on either side of the edge.
    field = np.where(ink, 0.5 - inside, outside - 0.5)
  return scipy.ndimage.gaussian_filter(field, 0.6).astype(np.float32)


@functools.cache
def _grid(side: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns field coordinates [2, side**2] and a warp basis [side, 5]."""
  centres = (np.arange(side) + 0.5) / side * _FIELD - _FIELD / 2
  rows, columns = np.meshgrid(centres, centres, indexing="ij")
  knots = (np.arange(5) - 2) * _FIELD / 4
  basis = np.exp(-0.5 * ((centres[:, None] - knots) / (_FIELD / 5)) ** 2)
  basis /= basis.sum(1, keepdims=True)
  return np.stack([rows.ravel(), columns.ravel()]), basis


def label_of(index: int) -> int:
  """Returns the class of image `index`: classes repeat in order."""
  return index % len(CHARACTERS)


def render(seed: int, split: str, index: int, size: int) -> np.ndarray:
  """Draws image `index` of a split: bright ink on black, uint8[size, size].

  Args:
    seed: Seed of the whole data set, at least 0.
    split: One of `SPLITS`.
    index: Number of the image in its split; its class is `label_of(index)`.
    size: Side in pixels.
  """
  rng = np.random.default_rng([seed, SPLITS.index(split), index])
  character = CHARACTERS[label_of(index)]
  fonts = fonts_with(character)
  font = fonts[rng.integers(len(fonts))]
  is_pen = bool(rng.random() < 0.7)

  # The place in the field of each point of the image. The map is the inverse
  # one: a scale above one makes the drawing smaller.
  turn = np.deg2rad(rng.normal(0, 8))
  shear = rng.normal(0, 0.25)
  stretch = np.exp(rng.normal(0, 0.15))
  rotation = np.array(
    [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
  )
  matrix = rotation @ np.array([[stretch, 0], [shear, 1 / stretch]])
  side = max(_FIELD, 2 * size)
  grid, basis = _grid(side)
  bumps = rng.normal(0, rng.uniform(0, 6), (2, 5, 5))
  warp = (basis @ bumps @ basis.T).reshape(2, -1)
  points = matrix @ (1.15 * grid) + warp + (_FIELD - 1) / 2
  field = scipy.ndimage.map_coordinates(
    _field(character, font, is_pen), points, order=1, mode="nearest"
  ).reshape(side, side)

  # Half a stroke's width, and the number of pixels over which ink fades to
  # paper.
  reach = rng.uniform(1.8, 4.8) if is_pen else rng.uniform(-0.2, 2.2)
  fade = rng.uniform(1, 2)
  ink = np.clip((reach - field) / fade + 0.5, 0, 1)
  image = Image.fromarray(np.round(255 * ink).astype(np.uint8))

  # The part to cut out, in pixels of the drawing. The ink gets most of the
  # image's height, and as much of its width as it needs. Wide letters are
  # squeezed and flat signs stretched, but not beyond recognition.
  rows = np.flatnonzero(ink.max(1) > 0.3)
  columns = np.flatnonzero(ink.max(0) > 0.3)
  top, left = rows[0], columns[0]
  ink_height, ink_width = rows[-1] + 1 - top, columns[-1] + 1 - left
  height = size * rng.uniform(0.88, 1)
  width = min(height * ink_width / ink_height, size * rng.uniform(0.55, 0.9))
  height = min(height, 1.6 * width * ink_height / ink_width)
  zoom_y, zoom_x = ink_height / height, ink_width / width
  top -= zoom_y * (size - height) * rng.uniform(0.2, 0.8)
  left -= zoom_x * (size - width) * rng.uniform(0.2, 0.8)

  small = size
  if rng.random() < 0.85:
    small = 8 + int(9 * rng.random() ** 2)
  shrink = (Image.Resampling.BOX, Image.Resampling.BILINEAR)
  grow = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
  image = _resized_part(
    image,
    (left, top, left + zoom_x * size, top + zoom_y * size),
    small,
    shrink[rng.integers(2)],
  )
  if small != size:
    image = image.resize((size, size), grow[int(rng.random() < 0.3)])
  pixels = np.asarray(image, np.float32)
  # Pixels of 8x8 scans are dimmer where a stroke is thin, but rarely
  # everywhere.
  pixels = pixels * (255 * rng.uniform(0.85, 1) / pixels.max())
  return np.round(pixels).astype(np.uint8)


def _resized_part(
  image: Image.Image,
  part: tuple[float, float, float, float],
  size: int,
  resampling: Image.Resampling,
) -> Image.Image:
  """Resizes a part (left, top, right, bottom), black outside of the image."""
  left, top, right, bottom = part
  beyond = max(-left, -top, right - image.width, bottom - image.height, 0)
  border = math.ceil(beyond)
  shifted = tuple(edge + border for edge in part)
  padded = ImageOps.expand(image, border)
  return padded.resize((size, size), resampling, shifted)


def render_many(
  seed: int, split: str, indices: collections.abc.Iterable[int], size: int
) -> np.ndarray:
  """Draws several images: uint8[n, size, size]."""
  images = [render(seed, split, index, size) for index in indices]
  return np.stack(images) if images else np.zeros((0, size, size), np.uint8)


def _main(arguments: list[str]) -> None:
  """Writes every `num_workers`-th chunk of a split to standard output, raw."""
  seed, size, count, worker, num_workers = map(int, arguments[1:])
  for start in range(worker * CHUNK, count, num_workers * CHUNK):
    indices = range(start, min(start + CHUNK, count))
    images = render_many(seed, arguments[0], indices, size)
    sys.stdout.buffer.write(images.tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
  _main(sys.argv[1:])

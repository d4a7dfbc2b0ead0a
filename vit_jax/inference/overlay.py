"""Pictures of an image and its attention map (Figure 6 of arXiv:2010.11929)."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

MOST = 2  # see `brightest`
SCALE = (
  "full brightness is the largest weight of the map, or twice its 95th"
  " percentile if that is less"
)
_SMALLEST = 192  # Smallest longer side of a picture, pixels.
_GAP = 4  # Pixels between two pictures of that size.


def beside(
  image: UInt8[np.ndarray, "h w c"], map: Float[np.ndarray, "gh gw"]
) -> Image.Image:
  """Returns the image, the image times the map, and the map, side by side.

  The map, drawn as a square for each patch, also shows attention to dark areas.

  Args:
    image: The image that the model got. A small image is enlarged by a whole
      factor, to 192 pixels or more on its longer side.
    map: Attention to each patch, 0 or more; its scale has no effect.
  """
  image = enlarged(_colours(image))
  return _joined([image, lit(image, map), _squares(map, image.shape[:2])])


def row(images: UInt8[np.ndarray, "parts h w 3"]) -> Image.Image:
  """Returns images of one size side by side, enlarged as by `enlarged`."""
  return _joined([enlarged(image) for image in images])


def compared(
  pairs: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Image.Image:
  """Returns the first image, and the maps of all models, side by side.

  Args:
    pairs: For each model, the image that it got, uint8 [h, w, 3], and its map
      [gh, gw]. All are scaled to the height of the first image.
  """
  first = enlarged(_colours(pairs[0][0]))
  height = len(first)
  parts = [first]
  for image, map in pairs:
    width = max(1, round(height * image.shape[1] / image.shape[0]))
    parts.append(_squares(map, (height, width)))
  return _joined(parts)


def enlarged(image: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "H W c"]:
  """Returns the image, enlarged by a whole factor if it is small.

  Its longer side is then 192 pixels or more.
  """
  factor = max(1, -(-_SMALLEST // max(image.shape[:2])))
  return image.repeat(factor, 0).repeat(factor, 1)


def lit(
  image: UInt8[np.ndarray, "h w c"], map: Float[np.ndarray, "gh gw"]
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the image times the map, which is scaled so that `brightest` is 1.

  The map is enlarged by Lanczos' filter, and clipped to 0 to 1. Its border
  values are repeated outside, because the filter would change them otherwise.

  Args:
    image: An image.
    map: Attention to each patch, 0 or more; its scale has no effect.
  """
  image = _colours(image)
  height, width, _ = image.shape
  (rows, columns), more = map.shape, 3  # the filter's reach
  top = max(brightest(map), 1e-30)
  map = np.minimum(np.asarray(map, np.float32) / top, 1)
  mask = np.pad(map, more, mode="edge")
  mask = Image.fromarray(mask).resize(
    (width, height),
    Image.Resampling.LANCZOS,
    box=(more, more, more + columns, more + rows),
  )
  mask = np.asarray(mask).clip(0, 1)
  return np.round(image * mask[..., None]).astype(np.uint8)


def brightest(map: Float[np.ndarray, "gh gw"]) -> float:
  """Returns the attention at which a patch has full brightness.

  It is the maximum, or `MOST` times the 95th percentile if that is less.
  Otherwise all patches would be black beside one with nearly all attention.
  """
  high = float(np.quantile(map, 0.95, method="lower"))
  return min(float(np.max(map)), MOST * high) or float(np.max(map))


def sheet(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
  """Returns a sheet with the pictures in rows, on a transparent background.

  Args:
    pictures: One or more; all are scaled to a height of 192 pixels, and to the
      width of the first one.
    columns: Largest number of pictures in a row.
  """
  width, height = pictures[0].size
  width, height = max(1, round(width * _SMALLEST / height)), _SMALLEST
  gap, columns = 4 * _GAP, min(columns, len(pictures))
  rows = -(-len(pictures) // columns)
  size = (columns * (width + gap) - gap, rows * (height + gap) - gap)
  whole = Image.new("RGBA", size)
  for i, picture in enumerate(pictures):
    corner = i % columns * (width + gap), i // columns * (height + gap)
    whole.paste(picture.resize((width, height)), corner)
  return whole


def _colours(image):
  """Returns an image with three channels, also for a grey one."""
  return np.broadcast_to(image, (*image.shape[:2], 3))


def _squares(map, size: tuple[int, int]):
  """Returns the map as colours: from black over red to pale yellow."""
  map = np.asarray(map, np.float32)
  map = (map / max(brightest(map), 1e-30)).clip(0, 1)
  colours = mpl.colormaps["magma"](map, bytes=True)[..., :3]
  picture = Image.fromarray(np.ascontiguousarray(colours))
  return np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST))


def _joined(images) -> Image.Image:
  """Returns images of the same height side by side, on white."""
  height = len(images[0])
  gap = max(1, _GAP * height // _SMALLEST)
  white = np.full((height, gap, 3), 255, np.uint8)
  parts = [part for image in images for part in (image, white)]
  return Image.fromarray(np.concatenate(parts[:-1], axis=1))

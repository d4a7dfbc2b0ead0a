"""An image beside where a model looks, as in Figure 6 of arXiv:2010.11929."""

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

_SMALLEST = 192  # Longer side of a picture at least, pixels.
_GAP = 4  # White between image and map, of a picture of that size.


def beside(
  image: UInt8[np.ndarray, "h w 3"], map: Float[np.ndarray, "gh gw"]
) -> Image.Image:
  """Returns the image and, right of it, the image lit by the map.

  Args:
    image: As the model got it; a small one is enlarged by a whole factor, to
      192 pixels or more on its longer side.
    map: Attention to each patch; see `lit`.
  """
  factor = max(1, -(-_SMALLEST // max(image.shape[:2])))
  image = image.repeat(factor, 0).repeat(factor, 1)
  height, width, _ = image.shape
  gap = max(1, _GAP * max(height, width) // _SMALLEST)
  picture = Image.new("RGB", (2 * width + gap, height), "white")
  picture.paste(Image.fromarray(image), (0, 0))
  picture.paste(Image.fromarray(lit(image, map)), (width + gap, 0))
  return picture


def lit(
  image: UInt8[np.ndarray, "h w 3"], map: Float[np.ndarray, "gh gw"]
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the image times the map, which is 1 where it is largest.

  The map is enlarged by Lanczos' filter, and what that makes negative is 0. Its
  border is continued outwards, without which the filter would raise it.

  Args:
    image: An image.
    map: Attention to each patch, 0 or more; its scale has no effect.
  """
  height, width, _ = image.shape
  (rows, columns), more = map.shape, 3  # the filter's reach
  mask = np.pad(np.asarray(map, np.float32), more, mode="edge")
  mask = Image.fromarray(mask).resize(
    (width, height),
    Image.Resampling.LANCZOS,
    box=(more, more, more + columns, more + rows),
  )
  mask = np.asarray(mask)
  mask = mask.clip(0) / max(float(mask.max()), 1e-30)
  return np.round(image * mask[..., None]).astype(np.uint8)

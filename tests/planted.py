"""Images that a model all but cannot tell, so that every detail of it shows.

They are blends of two digits between which the model's answer changes, at the
place where it does, found by halving, after JPEG. Labels are the model's own
answers with some setting, so that its score with that setting is exactly 100 %,
and with any other known in advance, image by image.
"""

import io
import pathlib
import shutil

import numpy as np
from PIL import Image
from sklearn import datasets

SIDES = 45, 59  # width and height: neither square nor even
HALVINGS = 12


def pictures(num: int) -> np.ndarray:
  """Returns digits on coloured ground, float [n, h, w, 3] in 0 to 255."""
  rng = np.random.default_rng(0)

  def enlarged(array):
    image = Image.fromarray(np.uint8(array))
    return np.asarray(image.resize(SIDES, Image.Resampling.BICUBIC), float)

  blends = []
  for digit in datasets.load_digits().images[:num]:
    ground = enlarged(rng.integers(0, 256, (2, 2, 3)))
    blends.append(0.6 * enlarged(15.9 * digit)[..., None] + 0.4 * ground)
  return np.stack(blends)


def jpeg(pixels: np.ndarray) -> bytes:
  """Returns a JPEG with colours of half the resolution."""
  stream = io.BytesIO()
  Image.fromarray(np.uint8(pixels.round())).save(stream, "JPEG", quality=90)
  return stream.getvalue()


def at_the_boundary(vit, num: int, num_digits: int = 120) -> list[bytes]:
  """Returns JPEGs at which the answer of a model is about to change.

  Args:
    vit: A `Pretrained` with class names.
    num: Number of images.
    num_digits: Number of digits to begin with.
  """
  digits = pictures(num_digits)
  names = np.array(answers(vit, list(map(jpeg, digits))))
  rng = np.random.default_rng(0)
  pairs = rng.integers(0, num_digits, (100 * num, 2))
  one, other = pairs[names[pairs[:, 0]] != names[pairs[:, 1]]][:num].T
  low, high = np.zeros(len(one)), np.ones(len(one))  # shares of the other

  def blended(share):
    share = share[:, None, None, None]
    return list(map(jpeg, (1 - share) * digits[one] + share * digits[other]))

  for _ in range(HALVINGS):
    middle = (low + high) / 2
    is_one = np.array(answers(vit, blended(middle))) == names[one]
    low, high = np.where(is_one, middle, low), np.where(is_one, high, middle)
  return blended((low + high) / 2)


def answers(vit, images: list[bytes]) -> list[str]:
  opened = [Image.open(io.BytesIO(data)) for data in images]
  return [answer[0].name for answer in vit.predict(opened, top=1)]


def write(folder: pathlib.Path, images: list[bytes], labels: list[str]) -> str:
  """Writes class folders; returns the name of the data set.

  Records are in the order of classes, and then of `images`.
  """
  shutil.rmtree(folder, ignore_errors=True)
  for i, (data, label) in enumerate(zip(images, labels, strict=True)):
    path = folder / label / f"{i:04}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return f"folder:{folder}"

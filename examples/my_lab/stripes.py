"""A source of records: stripes in noise, whose angle is the class."""

import numpy as np


class Stripes:
  """Images [32, 32, 3] of stripes; each is a function of its number.

  Args:
    split: "train" or "test".
    size: Number of images of "train", as text; "test" has a quarter.
  """

  num_classes = 4
  class_names = ("0°", "45°", "90°", "135°")

  def __init__(self, split: str, size: str = "256"):
    sizes = {"train": int(size), "test": int(size) // 4}
    self._split, self._size = split, sizes[split]  # KeyError: no such split

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    rng = np.random.default_rng([index, self._split == "test"])
    label = index % self.num_classes
    angle = label * np.pi / self.num_classes
    y, x = np.mgrid[:32, :32]
    phase = x * np.cos(angle) + y * np.sin(angle) + rng.uniform(0, 8)
    image = 128 + 60 * np.sin(phase * np.pi / 4) + rng.normal(0, 40, (32, 32))
    image = np.repeat(image[..., None], 3, 2).clip(0, 255).astype(np.uint8)
    return {"image": image, "label": label}

  def identity(self):
    return f"stripes-1-{self._split}-{self._size}"

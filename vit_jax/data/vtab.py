"""The 19 tasks of VTAB-1k: data sets, slices, classes; without heavy imports.

Every task has the splits `train800` and `val200` (for choosing options), both
together as `train800val200`, and `test`. The slices are fixed positions of
TFDS's splits, neither drawn nor balanced, so that a class may be missing.
`vit_jax.data.vtab_source` opens them as "vtab:<task>".

Source: arXiv:1910.04867 and google-research/task_adaptation (data/*.py and its
  tests) for slices, classes, sizes and versions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.data import splits

PREFIX = "vtab:"
NATURAL, SPECIALIZED, STRUCTURED = "natural", "specialized", "structured"


class Task(NamedTuple):
  """A task.

  Attributes:
    group: One of the three groups whose means are reported.
    dataset: Name in TFDS, with the version of the benchmark.
    num_classes: Number of classes.
    sizes: Numbers of records of TFDS's splits, which are checked.
    train: `train800` in terms of TFDS's splits.
    val: `val200` in terms of TFDS's splits.
    test: `test` in terms of TFDS's splits.
    label: Key of `vtab_source.LABELS`: how the label is made.
    image: Format of the images, "jpeg" or "png".
    size: (height, width) of the images, a typical one if they vary.
    note: How TFDS's data differ from those of the benchmark, or "".
  """

  group: str
  dataset: str
  num_classes: int
  sizes: Mapping[str, int]
  train: str
  val: str
  test: str = "test"
  label: str = "label"
  image: str = "jpeg"
  size: tuple[int, int] = (256, 320)
  note: str = ""

  @property
  def split_sizes(self) -> dict[str, int]:
    """Split of the task -> number of its records."""
    return {k: splits.num_records(v) for k, v in self._splits.items()}

  def spans(self, split: str) -> tuple[splits.Span, ...]:
    """Returns the records of a split, in terms of TFDS's splits.

    Args:
      split: Names of the task's splits, with optional slices, joined by "+".

    Raises:
      splits.SplitError: See `splits.parse_split`.

    Example:
      >>> TASKS["caltech101"].spans("val200[150:]")
      (Span(split='train', start=2904, stop=2954),)
    """
    spans = []
    for wanted in splits.parse_split(split, self.split_sizes):
      begin = 0
      for span in self._splits[wanted.split]:
        size = span.stop - span.start
        start = max(wanted.start - begin, 0)
        stop = min(wanted.stop - begin, size)
        if start < stop:
          first = span.start
          spans.append(splits.Span(span.split, first + start, first + stop))
        begin += size
    return tuple(spans)

  @property
  def _splits(self) -> dict[str, tuple[splits.Span, ...]]:
    """Split of the task -> parts of TFDS's splits, in this order."""
    train, val, test = (
      splits.parse_split(text, self.sizes)
      for text in (self.train, self.val, self.test)
    )
    return {
      "train800": train,
      "val200": val,
      "train800val200": train + val,
      "test": test,
    }


_CLEVR = Task(
  STRUCTURED,
  "clevr:3.*.*",
  8,
  {"train": 70_000, "validation": 15_000},
  "train[:800]",
  "train[63000:63200]",
  test="validation",  # the objects of CLEVR's own test are not public
  label="object_count",
  image="png",
  size=(320, 480),
)
_DSPRITES = Task(
  STRUCTURED,
  "dsprites:2.*.*",
  16,
  {"train": 737_280},
  "train[:800]",
  "train[589824:590024]",
  test="train[663552:]",
  label="x_position",
  image="png",
  size=(64, 64),
)
_SMALLNORB = Task(
  STRUCTURED,
  "smallnorb:2.*.*",
  18,
  {"train": 24_300, "test": 24_300},
  "train[:800]",
  "test[:200]",
  test="test[12150:]",
  label="label_azimuth",
  image="png",
  size=(96, 96),
)

TASKS = {
  "caltech101": Task(
    NATURAL,
    "caltech101:3.*.*",
    102,  # the background is one
    {"train": 3060, "test": 6084},
    "train[:800]",
    "train[2754:2954]",
  ),
  "cifar100": Task(
    NATURAL,
    "cifar100:3.*.*",
    100,
    {"train": 50_000, "test": 10_000},
    "train[:800]",
    "train[45000:45200]",
    image="png",
    size=(32, 32),
  ),
  "dtd": Task(
    NATURAL,
    "dtd:3.*.*",
    47,
    {"train": 1880, "validation": 1880, "test": 1880},
    "train[:800]",
    "validation[:200]",
  ),
  "oxford_flowers102": Task(
    NATURAL,
    "oxford_flowers102:2.*.*",
    102,
    {"train": 1020, "validation": 1020, "test": 6149},
    "train[:800]",
    "validation[:200]",
  ),
  "oxford_iiit_pet": Task(
    NATURAL,
    "oxford_iiit_pet:4.*.*",
    37,
    {"train": 3680, "test": 3669},
    "train[:800]",
    "train[2944:3144]",
    note="VTAB asks for version 3 of oxford_iiit_pet, which TFDS can no longer"
    " build; version 4 repaired 12 images, and its slices may be of other"
    " images",
  ),
  "sun397": Task(
    NATURAL,
    "sun397/tfds:4.*.*",
    397,
    {"train": 76_128, "validation": 10_875, "test": 21_750},
    "train[:800]",
    "validation[:200]",
  ),
  "svhn": Task(
    NATURAL,
    "svhn_cropped:3.*.*",
    10,
    {"train": 73_257, "test": 26_032},
    "train[:800]",
    "train[65931:66131]",
    image="png",
    size=(32, 32),
  ),
  "patch_camelyon": Task(
    SPECIALIZED,
    "patch_camelyon:2.*.*",
    2,
    {"train": 262_144, "validation": 32_768, "test": 32_768},
    "train[:800]",
    "validation[:200]",
    image="png",
    size=(96, 96),
  ),
  "eurosat": Task(
    SPECIALIZED,
    "eurosat/rgb:2.*.*",
    10,
    {"train": 27_000},
    "train[:800]",
    "train[16200:16400]",
    test="train[21600:]",
    size=(64, 64),
  ),
  "resisc45": Task(
    SPECIALIZED,
    "resisc45:3.*.*",
    45,
    {"train": 31_500},
    "train[:800]",
    "train[18900:19100]",
    test="train[25200:]",
    size=(256, 256),
  ),
  "diabetic_retinopathy": Task(
    SPECIALIZED,
    "diabetic_retinopathy_detection/btgraham-300:3.*.*",
    5,
    {"train": 35_126, "validation": 10_906, "test": 42_670},
    "train[:800]",
    "validation[:200]",
  ),
  "clevr_count": _CLEVR,
  "clevr_distance": _CLEVR._replace(num_classes=6, label="object_distance"),
  "dmlab": Task(
    STRUCTURED,
    "dmlab:2.0.1",
    6,
    {"train": 65_550, "validation": 22_628, "test": 22_735},
    "train[:800]",
    "validation[:200]",
    size=(360, 480),
  ),
  "dsprites_location": _DSPRITES,
  "dsprites_orientation": _DSPRITES._replace(label="orientation"),
  "kitti_distance": Task(
    STRUCTURED,
    "kitti:3.1.0",  # TFDS has newer ones; it still builds this
    4,
    {"train": 6347, "validation": 423, "test": 711},
    "train[:800]",
    "validation[:200]",
    label="vehicle_distance",
    image="png",
  ),
  "smallnorb_azimuth": _SMALLNORB,
  "smallnorb_elevation": _SMALLNORB._replace(
    num_classes=9, label="label_elevation"
  ),
}

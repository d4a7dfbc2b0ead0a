"""Opens data sets by name: "cifar10", "folder:/path", "my_lab.data:Shards".

What reads them, and TensorFlow, is imported when the first one is opened.
"""

import contextlib
import dataclasses
import io
import statistics
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from PIL import Image

from vit_jax.data import images, records, splits
from vit_jax.data.data_config import RunConfig
from vit_jax.data.dataset_info import prefix_of
from vit_jax.data.splits import NotOnDisk, SplitError
from vit_jax.names import Table

if TYPE_CHECKING:
  from vit_jax.data.source import Source

# Prefix of a name -> function (dataset, split, data_dir) -> Source. TFDS opens
# names without a prefix.
OPENERS = Table(
  {
    "csv:": "vit_jax.finetune.data.table_source:open_table",
    "parquet:": "vit_jax.finetune.data.table_source:open_table",
    "folder:": "vit_jax.data.folder:open_folder",
    "images:": "vit_jax.data.unlabelled_folder:open_images",
    "vtab:": "vit_jax.data.vtab_source:open_vtab",
  }
)


def open_source(
  dataset: str,
  split: str,
  data_dir: str | None = None,
  *,
  fake: bool = False,
  given: records.Given = MappingProxyType({}),
) -> "Source":
  """Opens a split of a data set.

  It never downloads. A data set of TFDS must have been prepared before, except
  the embedded ones (digits, glyphs), which are generated on first use. Splits
  of TFDS of up to 256 MiB, after slicing and drawing, stay in memory, encoded;
  larger ones are read from the files in every epoch.

  Args:
    dataset: Name in TFDS, with a config if it has several; "folder:/path" for
      images in one folder per class; "csv:/path" and "parquet:/path", see
      `finetune.data.table_source`; "images:/path" for images without classes;
      "vtab:TASK", see `vtab`; a key of `given`; or an import path, see
      `records`.
    split: A split such as "train", "train[:99%]" or "train[100:200]+test", or a
      subset of one, such as "train@2000" or "train[:99%]@10%/seed=1".
    data_dir: Folder of TFDS's data; None for $TFDS_DATA_DIR, or
      ~/tensorflow_datasets.
    fake: Whether to use fake records of the same shape and number instead; the
      data set need not exist on disk.
    given: See `Sources`.

  Raises:
    ValueError: Unknown data set (the message has the nearest name) or split (it
      has those that exist), records that are not on disk (it has the command
      that puts them there), or features other than an image and a label (see
      `tfds_source.find_label`).
  """
  from vit_jax.data import fake as fake_lib
  from vit_jax.data import record_source, subsets, tfds_source

  base, draw = splits.parse_draw(split)
  if dataset in given or records.is_own(dataset):
    make = given.get(dataset) or records.splits_of(dataset)
    source = record_source.open_records(dataset, base, make)
  else:
    opener = OPENERS.get(prefix_of(dataset), tfds_source.open_tfds)
    opener = fake_lib.open_fake if fake else opener
    source = opener(dataset, base, data_dir)
  if draw:
    num = source.num_examples
    indices = subsets.members(num, draw.count(num), draw.seed)
    source = subsets.Subset.of(source, indices, split)
  return tfds_source.in_memory_if_small(source)


class Sources:
  """Splits of data sets; each is opened once for all its readers.

  Args:
    data_dir: As for `open_source`.
    fake: As for `open_source`.
    given: Data sets that are objects of the program, by the name that a config
      gives them: split -> `records.Records`; or a function of the split's name.
  """

  def __init__(
    self,
    data_dir: str | None = None,
    *,
    fake: bool = False,
    given: records.Given = MappingProxyType({}),
  ):
    self.data_dir, self._fake = data_dir, fake
    self._given = {
      name: makes if callable(makes) else makes.__getitem__
      for name, makes in given.items()
    }
    self._opened: dict[tuple[str, str], Source] = {}

  @classmethod
  def of(
    cls, config: RunConfig, given: records.Given | None = None
  ) -> "Sources":
    """Returns the sources of a run, with data sets of the program, if any."""
    return cls(config.data.data_dir, fake=config.fake_data, given=given or {})

  def open(self, dataset: str, split: str) -> "Source":
    """Opens a split by `open_source`; the same object for the same names."""
    key = dataset, split
    if key not in self._opened:
      self._opened[key] = open_source(
        *key, self.data_dir, fake=self._fake, given=self._given
      )
    return self._opened[key]

  def inspect(self, dataset: str, split: str) -> "Source":
    """Opens a split as `open` does, but generates no embedded data set.

    For a data set that would be generated, it returns fake records of the same
    number and classes. So a config can be checked before.
    """
    key = dataset, split
    is_open = key in self._opened or self._fake or dataset in self._given
    if is_open or prefix_of(dataset) in OPENERS or records.is_own(dataset):
      return self.open(*key)
    from vit_jax.data import tfds_source

    names = tfds_source.names_if_generated(dataset, self.data_dir)
    if not names:
      return self.open(*key)
    fake = open_source(*key, self.data_dir, fake=True)
    return dataclasses.replace(fake, class_names=names)

  def train_val_test(self, dataset: str, share: str) -> tuple[str, str, str]:
    """Returns the splits to train on, to choose by and to test on.

    It does not raise: `inspect` refuses the splits of an unknown data set.

    Args:
      dataset: The name. With the splits `test` and `val` (or `validation`), all
        three are used whole. Otherwise `test`, or `val` without `test`, is the
        test split, and the records of `train` after `share` are chosen by. If
        `train` is alone, its last tenth is the test split.
      share: The part of `train`, without a test split, that is then trained on,
        such as "90%". Images in a list are rounded class by class, see
        `Listed.cut`.
    """
    from vit_jax.data.listed import Listed

    tests = [s for s in ("test", "val", "validation") if self._has(dataset, s)]
    if len(tests) > 1 and tests[0] == "test":
      return "train", tests[1], "test"
    if not tests:
      share = f"{0.9 * float(share.removesuffix('%')):g}%"
    with contextlib.suppress(ValueError):
      train = self.inspect(dataset, "train")
      if isinstance(train, Listed):
        share = train.cut(share)
    if not tests:
      return f"train[:{share}]", f"train[{share}:90%]", "train[90%:]"
    return f"train[:{share}]", f"train[{share}:]", tests[0]

  def _has(self, dataset: str, split: str) -> bool:
    """Whether `inspect` finds the split, or fails for another reason."""
    try:
      self.inspect(dataset, split)
    except SplitError:
      return False
    except ValueError:  # `inspect` reports it later
      pass
    return True

  def is_on_disk(self, dataset: str, split: str) -> bool:
    """Whether `inspect` finds records, or fails for another reason."""
    try:
      self.inspect(dataset, split)
    except NotOnDisk:
      return False
    except ModuleNotFoundError:  # the command says what to install
      raise
    except Exception:  # `errors` reports it
      pass
    return True

  def errors(
    self, dataset: str, split: str, dataset_key: str, split_key: str
  ) -> list[str]:
    """Returns the error of `inspect` instead of raising it.

    Args:
      dataset: As for `inspect`.
      split: As for `inspect`.
      dataset_key: Path of the option with the data set's name.
      split_key: Path of the option with the split's name.
    """
    try:
      self.inspect(dataset, split)
    except SplitError as e:
      return [f"{split_key}: {e}"]
    except ModuleNotFoundError:  # the command says what to install
      raise
    except Exception as e:  # reported with the other errors of the config
      return [f"{dataset_key}: {e}"]
    return []


def shrunk(
  source: "Source", config: RunConfig, on_image: Callable[[], object]
) -> "Source":
  """Returns a source whose large images are shrunk; see config.data.shrink.

  Args:
    source: The training data.
    config: The run.
    on_image: Called for each image that is shrunk now.
  """
  if not config.data.shrink:
    return source
  from vit_jax.finetune.data import shrunk

  data = config.data
  return shrunk.shrunk(source, data.shrink, data.ops, on_image)


def typical_side(source: "Source", num_images: int = 32) -> int:
  """Returns the median shorter side of the first images of a split, in pixels.

  Images that cannot be read are left out; 0 if none can be read.
  """
  sides = []
  records = source.records(0, min(num_images, source.num_examples))
  for record in records.ignore_errors():  # the run reports them
    if record["image"].dtype != "string":  # not a file, but pixels
      sides.append(min(record["image"].shape[:2]))
      continue
    try:
      data = io.BytesIO(record["image"].numpy())
      with Image.open(data, formats=images.FORMATS) as image:
        sides.append(min(image.size))
    except images.BROKEN:
      pass
  return int(statistics.median(sides)) if sides else 0

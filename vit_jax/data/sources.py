"""Opens data sets by name: "cifar10", "glyphs/size=32", "folder:/path"."""

import dataclasses

from vit_jax.config import Config
from vit_jax.data import fake, folder, tfds_source
from vit_jax.data.records import Source
from vit_jax.data.splits import SplitError

__all__ = ["SOURCES", "Source", "faults", "open_source"]

# Kind of source -> function (dataset, split, data_dir) -> Source.
SOURCES = {
  "tfds": tfds_source.open_tfds,
  "folder": folder.open_folder,
  "fake": fake.open_fake,
}


def open_source(
  dataset: str, split: str, data_dir: str | None = None, *, fake: bool = False
) -> Source:
  """Opens a split of a data set.

  Never downloads. A data set of TFDS must have been prepared before, except
  for the embedded ones (digits, glyphs), which are made on first use.
  Splits of up to 256 MiB are kept in memory, encoded; larger ones are streamed.

  Args:
    dataset: name in TFDS, with a config if it has several, or "folder:/path"
      for images in one folder per class.
    split: such as "train", "train[:99%]" or "train[100:200]+test".
    data_dir: where TFDS data lie; None: $TFDS_DATA_DIR, or
      ~/tensorflow_datasets.
    fake: make up records of the same shape and number instead; the data set
      need not be there.

  Raises:
    ValueError: Unknown data set (with the nearest name) or split (with those
      that exist), records that are not on disk (with the command that puts
      them there), or features other than `image` and `label`.
  """
  return SOURCES[kind_of(dataset, fake)](dataset, split, data_dir)


def look_at(
  dataset: str, split: str, data_dir: str | None = None, *, fake: bool = False
) -> Source:
  """As `open_source`, but makes no data set.

  An embedded one that is absent is stood in for by made-up records of the same
  number and classes, so that faults can be told before it is made.
  """
  if kind_of(dataset, fake) != "tfds":
    return open_source(dataset, split, data_dir, fake=fake)
  if not tfds_source.will_be_made(dataset, data_dir):
    return open_source(dataset, split, data_dir)
  stand_in = open_source(dataset, split, data_dir, fake=True)
  names = tfds_source.class_names(dataset, data_dir)
  return dataclasses.replace(stand_in, class_names=names)


def kind_of(dataset: str, fake: bool = False) -> str:
  """Returns the key of `SOURCES` that opens a data set."""
  if fake:
    return "fake"
  return "folder" if dataset.startswith(folder.PREFIX) else "tfds"


def faults(config: Config, is_training: bool = True) -> list[str]:
  """Returns all that is wrong with the data of a config; raises nothing.

  Opens every data set, but makes none: an embedded one that is absent is
  looked at by what is known of it. Preprocessing is not looked at:
  `vit_jax.config.preprocessing` does that.

  Args:
    config: the run.
    is_training: False leaves out the split to train on.
  """
  found = []
  if is_training:
    found += _open_faults(config, "config.data", config.data, "split")
  for evaluator in config.evals:
    where = f"config.evals.{evaluator.name}"
    for option in ("train_split", "split"):
      if hasattr(evaluator, option):
        found += _open_faults(config, where, evaluator, option)
  return list(dict.fromkeys(found))  # An evaluator may share one of the data.


def _open_faults(config: Config, where: str, options, option: str):
  split, data_dir = getattr(options, option), config.data.data_dir
  at = where if options.dataset is not None else "config.data"
  dataset = options.dataset or config.data.dataset
  try:
    look_at(dataset, split, data_dir, fake=config.fake_data)
  except SplitError as e:
    return [f"{where}.{option}: {e}"]
  except Exception as e:  # Whatever it is, the others shall be told as well.
    return [f"{at}.dataset: {e}"]
  return []

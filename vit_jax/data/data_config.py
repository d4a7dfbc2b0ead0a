"""The options of the training data."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from vit_jax.batch import View
from vit_jax.data.operation import MAX_PIXELS
from vit_jax.data.preprocessing import with_decoding
from vit_jax.families import ModelConfig
from vit_jax.objectives import Objective
from vit_jax.options import AT_LEAST_0, AT_LEAST_1, option


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The training data."""

  dataset: str = option(
    "imagenet2012",
    "TFDS name (cifar10, glyphs/...), folder:/path, images:/path, csv:/path,"
    " parquet:/path, vtab:TASK, or an import path",
  )
  split: str = option(
    "train",
    "split to train on; a slice such as train[:99%]; or a random subset such as"
    " train@2000 or train@10%/seed=1",
  )
  data_dir: str | None = option(
    None,
    "folder of TFDS data, on disk or in a bucket; None: $TFDS_DATA_DIR or"
    " ~/tensorflow_datasets",
  )
  ops: str = option(
    "decode_inception_crop(224)|flip_lr",
    "preprocessing of an image: operations, separated by |",
  )
  background: str | None = option(
    None,
    "colour behind transparent images in training, evaluation and predict:"
    " white, black, '#ff8800'; None: fully transparent pixels become white, and"
    " other pixels lose their alpha channel",
  )
  max_pixels: int = option(
    MAX_PIXELS, "height x width of the largest image that is decoded"
  )
  shrink: int = option(
    0,
    "shorter side, in pixels, of cached copies of large training images"
    " (folder:, images:, csv:): an image whose shorter side is at least twice"
    " as long is shrunk once; 0: no image is",
    limit=AT_LEAST_0,
  )
  batch_size: int = option(
    4096, "images per step, over all devices", limit=AT_LEAST_1
  )
  repeats: int = option(
    1,
    "copies of an image in a batch, each with its own augmentation, dropout and"
    " stochastic depth (repeated augmentation); an epoch has as many rows as"
    " without copies, so with 3 copies it has a third of the images",
    limit=AT_LEAST_1,
  )
  shuffle_buffer: int = option(
    50_000,
    "encoded records in memory, in all processes together, to shuffle streamed"
    " files; an ImageNet record takes 110 kB",
    limit=AT_LEAST_1,
  )

  @property
  def decoding(self) -> dict[str, Any]:
    """The arguments of `preprocessing.with_decoding`, for all operations."""
    return {"background": self.background, "max_pixels": self.max_pixels}

  def views(self, objective: Objective) -> dict[str, View]:
    """Returns what a training batch has of each record, with `decoding`."""
    return {
      name: view._replace(ops=with_decoding(view.ops, **self.decoding))
      for name, view in objective.views(self.ops).items()
    }


@runtime_checkable
class RunConfig(Protocol):
  """What the input pipeline reads of `vit_jax.config.Config`."""

  seed: int
  fake_data: bool
  data: DataConfig
  model: ModelConfig
  objective: Objective

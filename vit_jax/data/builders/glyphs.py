"""TFDS builder `glyphs`: letters and symbols in any number, size and seed."""

import collections.abc
import contextlib
import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data.builders import embedded, render
from vit_jax.options import unexpected


@dataclasses.dataclass(eq=False, kw_only=True)
class GlyphsConfig(tfds.core.BuilderConfig):
  """The options of `glyphs`, which also decide the name of its folder.

  Attributes:
    size: Side of the images in pixels, at least 8.
    count: Number of images in `train`.
    seed: Seed of every random choice, at least 0.
  """

  name: str = dataclasses.field(init=False)
  size: int = 32
  count: int = 20_000
  seed: int = 0

  def __post_init__(self):
    for option, least in (("size", 8), ("count", 1), ("seed", 0)):
      value = getattr(self, option)
      if type(value) is not int or value < least:
        expected = f"a whole number from {least}"
        raise ValueError(unexpected(f"glyphs/{option}", repr(value), expected))
    self.name = f"size{self.size}_count{self.count}_seed{self.seed}"
    self.description = (
      f"{self.count} training images, {self.size} pixels, seed {self.seed}."
    )

  @classmethod
  def from_name(cls, name: str) -> "GlyphsConfig":
    """Reads the options back from the name of a folder."""
    match = re.fullmatch(r"size(\d+)_count(\d+)_seed(\d+)", name)
    if not match:
      expected = "options such as glyphs/size=32,count=20000,seed=0"
      raise ValueError(unexpected("glyphs", repr(name), expected))
    size, count, seed = map(int, match.groups())
    return cls(size=size, count=count, seed=seed)


def num_validation(count: int) -> int:
  """Returns the size of `validation`: 5 %, at least one image of each class.

  These images come in addition to the `count` training images, with random
  draws of their own.
  """
  return max(count // 20, len(render.CHARACTERS))


def images(
  config: GlyphsConfig, split: str, count: int, num_workers: int | None = None
) -> collections.abc.Iterator[np.ndarray]:
  """Yields the first `count` images of a split in order: uint8[size, size].

  Args:
    config: Size and seed.
    split: One of `render.SPLITS`.
    count: Number of images.
    num_workers: Number of worker processes; 0 draws in this process. The
      default is one per available core if there is enough work. The images do
      not depend on it.

  Raises:
    RuntimeError: A worker stopped early.
  """
  if num_workers is None:
    cores = (
      len(os.sched_getaffinity(0))
      if sys.platform == "linux"
      else (os.cpu_count() or 1)
    )
    num_workers = min(cores, count // 1000)
  if num_workers == 0:
    for index in range(count):
      yield render.render(config.seed, split, index, config.size)
    return
  # Not `multiprocessing`: its children import the program's main module again,
  # and with it all of jax and TensorFlow. A full pipe makes a worker wait for
  # the reader.
  environment = os.environ | {"OMP_NUM_THREADS": "1"}
  options = [split, config.seed, config.size, count]
  with contextlib.ExitStack() as stack:
    workers = []
    for worker in range(num_workers):
      command = [sys.executable, "-P", render.__file__]
      command += map(str, [*options, worker, num_workers])
      process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment
      )
      # Last started, first ended: stop the worker, close its pipe, wait for it.
      stack.enter_context(process)
      stack.callback(process.kill)
      workers.append(process)
    for chunk, start in enumerate(range(0, count, render.CHUNK)):
      shape = (min(render.CHUNK, count - start), config.size, config.size)
      process = workers[chunk % num_workers]
      raw = process.stdout.read(int(np.prod(shape)))
      if len(raw) != np.prod(shape):
        raise RuntimeError(
          f"glyphs: a worker stopped at image {start} of {count} (exit code"
          f" {process.wait()}); its own message is above."
        )
      yield from np.frombuffer(raw, np.uint8).reshape(shape)


class Glyphs(embedded.EmbeddedBuilder):
  """Letters and symbols of many scripts, drawn as if written by hand.

  They are drawn from the fonts that matplotlib ships, and never include a
  digit. Options are in the name:
  `tfds.builder("glyphs/size=32,count=20000,seed=0")`; missing ones have these
  values. `validation` adds 5 % to the `count` of `train`.
  """

  VERSION = tfds.core.Version("1.1.0")
  RELEASE_NOTES = {"1.1.0": "Records can be read by number (array_record)."}

  def __init__(
    self,
    *,
    config: str | GlyphsConfig | None = None,
    size: int | None = None,
    count: int | None = None,
    seed: int | None = None,
    **kwargs,
  ):
    """Has as arguments the options or a config; for others see TFDS."""
    options = {"size": size, "count": count, "seed": seed}
    options = {k: v for k, v in options.items() if v is not None}
    if isinstance(config, str):
      config = GlyphsConfig.from_name(config)
    if config is not None and options:
      got = f"the config {config.name!r} and {options}"
      raise ValueError(unexpected("glyphs", got, "one of them"))
    super().__init__(config=config or GlyphsConfig(**options), **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    size = self.builder_config.size
    return embedded.EmbeddedInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Image(
            shape=(size, size, 1), encoding_format="png"
          ),
          "label": tfds.features.ClassLabel(names=list(render.CHARACTERS)),
        }
      ),
      supervised_keys=("image", "label"),
    )

  def _split_generators(self, dl_manager) -> dict[str, object]:
    del dl_manager  # Nothing to download.
    count = self.builder_config.count
    return {
      "train": self._generate_examples("train", count),
      "validation": self._generate_examples(
        "validation", num_validation(count)
      ),
    }

  def _generate_examples(
    self, split: str, count: int
  ) -> collections.abc.Iterator[tuple[int, dict]]:
    drawn = images(self.builder_config, split, count)
    for index, image in enumerate(drawn):
      yield (
        index,
        {"image": embedded.png(image), "label": render.label_of(index)},
      )

"""Activations of the frozen part, computed once for all training images.

A run that trains only the head, or the last blocks, would apply the frozen part
of its model to the same images in every step. `compute` applies it before the
first step. The batches then have activations in place of images. Their order,
labels, masks and random numbers do not change.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import microbatch, sharding
from vit_jax.batch import Batch
from vit_jax.eval_context import activated
from vit_jax.experiment import Experiment
from vit_jax.finetune.frozen import FrozenPart
from vit_jax.step import Params

if TYPE_CHECKING:
  from vit_jax.data.pipeline import TrainingData


@dataclasses.dataclass(frozen=True)
class Activations:
  """Activations of all images of a `TrainingData`.

  Attributes:
    data: The training data.
    image: Activations [n, versions, ...]; the second version is mirrored.
    label: Labels [n] or [n, classes].
    mask: Whether a record counts, bool [n].
    note: A text for the summary of the run.
  """

  data: "TrainingData"
  image: np.ndarray
  label: np.ndarray
  mask: np.ndarray
  note: str

  def batches(self, start_step: int) -> Iterator[Batch]:
    """Yields the batches of `data`, with activations in place of images."""
    step = start_step
    while True:
      index, is_mirrored = self.data.rows(step)
      yield Batch(
        image=self.image[index, is_mirrored.astype(int)],
        label=self.label[index],
        mask=self.mask[index],
        index=self.data.row_numbers(step, 0, index),
      )
      step += 1


def compute(
  experiment: Experiment,
  part: FrozenPart,
  mesh: jax.sharding.Mesh,
  params: Params,
  on_batch: Callable[[], None] = lambda: None,
) -> Activations:
  """Returns the activations of all training images.

  Args:
    experiment: The run.
    part: The frozen part, without an `obstacle`.
    mesh: Mesh of the run.
    params: Parameters of the model.
    on_batch: Called before every batch of images.

  Raises:
    DataError: Records cannot be read.
  """
  # Only a run that reads records imports TensorFlow.
  from vit_jax.data.pipeline import eval_batches

  data, began = experiment.data, time.monotonic()
  num, versions = data.num_examples, 1 + (data.flip is not None)
  devices = [*mesh.devices.flat]

  @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
  def fn(params, batch):
    images = [batch["image"], batch["image"][:, :, ::-1]][:versions]
    forward = functools.partial(part, params)
    results = [microbatch.few_at_a_time(forward, x, devices) for x in images]
    return jnp.stack(results, axis=1)

  image = np.empty((num, versions, *part.output.shape), part.output.dtype)
  label = mask = None
  batches = eval_batches(
    data.source,
    data.unflipped_ops,
    batch_size=experiment.config.data.batch_size,
  )
  for batch in activated(fn, params, batches, mesh, on_batch):
    if label is None:
      label = np.zeros((num, *batch["label"].shape[1:]), batch["label"].dtype)
      mask = np.zeros(num, bool)
    is_record = batch["index"] >= 0  # other rows pad the last batch
    index = batch["index"][is_record]
    for to, key in ((image, "image"), (label, "label"), (mask, "mask")):
      to[index] = batch[key][is_record]
  mirrored = ", as they are and mirrored" * (versions - 1)
  note = (
    f"{part}, computed once: {num:,} images{mirrored},"
    f" {image.nbytes / 2**20:,.1f} MiB, {time.monotonic() - began:.1f} s"
  )
  return Activations(data, image, label, mask, note)


def num_images(experiment: Experiment) -> int:
  """Returns the number of images whose activations a run would compute."""
  data = experiment.data
  return data.num_examples * (1 + (data.flip is not None))


def obstacle(experiment: Experiment, part: FrozenPart) -> str:
  """Returns why a run must apply its frozen part in every step, or ""."""
  config = experiment.config
  if experiment.given_data is not None:
    return "the data were passed to the run"
  if jax.process_count() > 1:
    return "the run has several processes"
  if not config.objective.passes_images:
    return "config.objective changes the images"
  if part.is_random:
    return "the model is random in training, as with dropout"
  data = experiment.data
  # Only a run that reads records imports TensorFlow.
  from vit_jax.data import pixels

  if pixels.is_random(data.unflipped_ops):
    return "config.data.ops has random operations other than a last flip_lr"
  if not data.source.is_by_number:
    return "the records are streamed"
  images = num_images(experiment)
  # Steps before a resume count, too: a resumed run decides as before.
  seen = experiment.run_shape.total_steps * config.data.batch_size
  if seen <= images:
    return (
      f"the run sees only {seen:,} images, and activations of {images:,} would"
      " be computed"
    )
  return ""

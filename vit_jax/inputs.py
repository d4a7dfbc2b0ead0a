"""The batches of a run on its devices: images, or activations in their place.

A part of the model before the first trained module gives the same activations
for an image in every step. They are computed once, if the run reads the same
images without random changes and the memory is large enough.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from vit_jax import batch, sharding
from vit_jax.config import EvaluatorConfig
from vit_jax.experiment import Experiment
from vit_jax.step import Trainer, TrainState

if TYPE_CHECKING:
  from vit_jax.finetune.frozen import FrozenPart


class Inputs:
  """The training batches of a run, and what its evaluators may cache.

  Args:
    experiment: The run.
    trainer: Its model; what is trained decides which activations are constant.
    mesh: Its mesh.
    on_batch: Called before every batch whose activations are computed.
  """

  def __init__(
    self,
    experiment: Experiment,
    trainer: Trainer,
    mesh: jax.sharding.Mesh,
    on_batch: Callable[[], None] = lambda: None,
  ):
    self._experiment, self._mesh, self._on_batch = experiment, mesh, on_batch
    self._frozen = trainer.trainable.frozen_part
    self._bytes_left = 0
    if self._frozen is not None:
      from vit_jax.finetune.frozen import memory

      self._bytes_left = memory() // 4
    self._caching_evals: list[str] = []

  def cached_part(self, e: EvaluatorConfig) -> "FrozenPart | None":
    """Returns the part whose activations an evaluator caches, or None.

    Evaluators come before `abstract_batch`, and so have the memory first.
    """
    part, sources = self._frozen, self._experiment.sources
    if part is None or not e.every_steps or jax.process_count() > 1:
      return None
    splits = {k: sources.inspect(e.dataset, getattr(e, k)) for k in e.SPLITS}
    num_bytes = sum(e.num_images(splits)) * part.num_bytes
    if not e.scores_head or num_bytes > self._bytes_left:
      return None
    self._bytes_left -= num_bytes
    self._caching_evals.append(e.name)
    return part

  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of what `batches` yields."""
    experiment, config = self._experiment, self._experiment.config
    shape = experiment.run_shape
    has_vectors = batch.has_vectors(experiment.data_info)
    rows = sharding.abstract_batch(
      config.data.batch_size,
      config.view_shapes,
      (shape.num_classes,) if has_vectors else (),
      self._mesh,
    )
    if self._part is not None:
      rows["image"] = rows["image"].update(
        shape=(config.data.batch_size, *self._part.output.shape),
        dtype=self._part.output.dtype,
      )
    return rows

  def batches(
    self, start: int, saved: Mapping[str, Any], state: TrainState
  ) -> tuple[Iterator[dict[str, jax.Array]], str]:
    """Returns the batches from a step on, and a line for the summary or "".

    They continue after the images that the run has already seen, even if the
    batch size changed.

    Args:
      start: Updates already applied.
      saved: Metadata of the checkpoint of `start`; {} for a new run.
      state: The state before the next step.

    Raises:
      DataError: As `batch.checked`.
    """
    e, config = self._experiment, self._experiment.config
    index, count = jax.process_index(), jax.process_count()
    first = batch.batches_seen(saved, start, config.data.batch_size)
    note = ""
    if self._part is None or start >= e.run_shape.total_steps:
      if self._frozen is not None and self._part is None:
        note = f"{self._frozen}, computed in every step: {self._why_not}"
      batches = batch.checked(
        e.data.batches(first, index, count),
        rows=config.data.batch_size // count,
        shapes=config.view_shapes,
        num_classes=e.run_shape.num_classes,
        is_regression=getattr(e.data_info, "is_regression", False),
        start_step=first,
        process_index=index,
        process_count=count,
      )
    else:
      from vit_jax.finetune import activations

      computed = activations.compute(
        e, self._part, self._mesh, state.model_params, self._on_batch
      )
      note, batches = computed.note, computed.batches(first)
    if note:
      names = ", ".join(self._caching_evals)
      more = f"; the evaluations of {names} cache theirs" if names else ""
      note = f"frozen      {note}{more}"
    return (sharding.to_global(b, self._mesh) for b in batches), note

  @functools.cached_property
  def _part(self) -> "FrozenPart | None":
    """The part whose activations replace the images, or None."""
    return None if self._frozen is None or self._why_not else self._frozen

  @functools.cached_property
  def _why_not(self) -> str:
    """Why the frozen part is applied in every step, or ""."""
    from vit_jax.finetune import activations

    part = self._frozen
    if reason := activations.obstacle(self._experiment, part):
      return reason
    num_images = activations.num_images(self._experiment)
    num_bytes = num_images * part.num_bytes
    if num_bytes > self._bytes_left:
      return (
        f"its activations of {num_images:,} images take"
        f" {num_bytes / 2**30:,.1f} GiB, more than the"
        f" {self._bytes_left / 2**30:,.1f} GiB that are left of a quarter of"
        " the memory"
      )
    return ""

"""The interface of objectives: options, checks, and a loss for the step."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from vit_jax.batch import DataInfo, RunShape, View
from vit_jax.families import ModelConfig

if TYPE_CHECKING:
  import flax.linen


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is learned: options of all objectives, and their interface.

  Class attributes:
    trains_head: Whether the logits are those of the data's classes. If not,
      evaluators that score logits are an error, and the checkpoint has no head.
    standardises: Whether `make` needs `RunShape.standardisation`.
    own: Start of the paths of the objective's own parameters, such as
      "masked_patch/", or None. `config.init` and `vit_jax.load` leave them out
      for models without this objective.
  """

  kind: str = ""  # the key of OBJECTIVES

  trains_head: ClassVar[bool] = True
  standardises: ClassVar[bool] = False
  own: ClassVar[str | None] = None

  @property
  def head_loss(self) -> str | None:
    """The head's loss, for the metadata; None if no head is trained."""
    return None

  @property
  def counts_classes(self) -> bool:
    """Whether `make` needs `RunShape.class_counts`."""
    return False

  @property
  def passes_images(self) -> bool:
    """Whether `make` returns the model itself, applied to unchanged images.

    The activations of a frozen part are then the same in every step.
    """
    return False

  def errors(self) -> Iterator[str]:
    """Yields the errors that the options alone show, one text each."""
    return iter(())

  def model_errors(
    self, model: ModelConfig, image_size: tuple[int, int]
  ) -> Iterator[str]:
    """Yields why the objective cannot train a model on images of this size.

    Args:
      model: `config.model`, without errors of its own.
      image_size: (height, width) in pixels, which fit the model.
    """
    return iter(())

  def start_errors(self, model: ModelConfig) -> Iterator[str]:
    """Yields why no new run may train a model; a resumed run may."""
    return iter(())

  def data_errors(self, data: DataInfo) -> Iterator[str]:
    """Yields why the objective cannot learn from data."""
    return iter(())

  def views(self, ops: str) -> dict[str, View]:
    """Returns what a batch has of each record, by its key in the batch.

    A record is decoded once for all its crops.

    Args:
      ops: config.data.ops, which also decide the size of the model's images.
    """
    return {"image": View(ops)}

  def paired(self, batch: dict) -> dict:
    """Returns a global batch, possibly with arrays of other rows for each row.

    The step calls it before it divides rows over devices and microbatches, so
    that `loss_fn` needs no other row.
    """
    return batch

  def make(
    self, model: ModelConfig, run_shape: RunShape
  ) -> tuple["flax.linen.Module", Callable]:
    """Returns the module that is trained, and its loss.

    Args:
      model: `config.model`.
      run_shape: The sizes of the run.

    Returns:
      module: A `flax.linen.Module`. It maps images [b, h, w, c] in [-1, 1] to
        (logits, out), as every model does. Its `init` on such images makes all
        parameters.
      loss_fn: (params, batch, rng) -> (sum, count, named). `sum` is the loss
        summed over the valid items of a batch, `count` their number, `named`
        further sums to log by name; all are float32 scalars. The step adds them
        up over microbatches and devices, and divides by the count. So the loss
        of a row must not depend on other rows, unless `paired` adds them to it.
        Random numbers must follow from `rng`, the key of the step, and from the
        record's number batch["index"], not from the position of the row. Only
        the module may read `params`: those of scanned blocks are one device's
        parts (`models.stacking.Part`), which the scan's body gathers.
    """
    raise NotImplementedError(type(self).__name__)

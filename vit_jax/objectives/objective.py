"""What every objective has: options, checks, and a loss for the step."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from vit_jax.batch import DataInfo, RunShape
from vit_jax.families import ModelConfig

if TYPE_CHECKING:
  import flax.linen


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is learned: the options of all objectives; each kind adds its own.

  Class attributes:
    trains_head: Whether the logits are those of the data's classes. Otherwise
      evaluators that score them are refused, and the checkpoint has no head.
    standardises: Whether `make` needs `RunShape.standardisation`.
    own: Start of the paths of the objective's own parameters, such as
      "masked_patch/"; None: it has none. `config.init` and `vit_jax.load` leave
      them out for models without this objective.
  """

  kind: str = ""  # the key of OBJECTIVES

  trains_head: ClassVar[bool] = True
  standardises: ClassVar[bool] = False
  own: ClassVar[str | None] = None

  @property
  def head_loss(self) -> str | None:
    """What metadata state as the loss of the head; None: it trains none."""
    return None

  @property
  def counts_classes(self) -> bool:
    """Whether `make` needs `RunShape.class_counts`."""
    return False

  @property
  def passes_images(self) -> bool:
    """Whether the module is the model, and the loss applies it to each image of
    the batch as it is: what a frozen part makes of it is then always the same.
    """
    return False

  def errors(self) -> Iterator[str]:
    """Yields the errors that the options alone show, one text each."""
    return iter(())

  def model_errors(
    self, model: ModelConfig, image_size: tuple[int, int]
  ) -> Iterator[str]:
    """Yields why it cannot train a model on images of a size.

    Args:
      model: `config.model`, which has no errors.
      image_size: (height, width) in pixels, which suit the model.
    """
    return iter(())

  def start_errors(self, model: ModelConfig) -> Iterator[str]:
    """Yields why no new run may train a model; a resumed one may."""
    return iter(())

  def data_errors(self, data: DataInfo) -> Iterator[str]:
    """Yields why it cannot learn from data."""
    return iter(())

  def paired(self, batch: dict) -> dict:
    """Returns a global batch, maybe with arrays of other rows for each row.

    The step calls it before rows are divided over devices and microbatches, so
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
      module: A `flax.linen.Module`. Called on images [b, h, w, c] in [-1, 1]
        it returns (logits, out), as every model does; its `init` on such images
        makes all parameters.
      loss_fn: (params, batch, rng) -> (sum, count, named): the loss summed
        over what counts in the rows of a batch, how much counts, and further
        sums to log by name, each a float32 scalar. The step adds them up over
        microbatches and devices and divides by the count. So the loss of a row
        must not depend on other rows, unless `paired` adds them to it, and
        random numbers must follow from `rng`, the key of the step, and the
        record's number batch["index"], not from the position of the row. Only
        the module reads `params`: those of scanned blocks are one device's
        parts (`models.stacking.Part`), which the scan's body gathers.
    """
    raise NotImplementedError(type(self).__name__)

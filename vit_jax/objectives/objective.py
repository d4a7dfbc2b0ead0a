"""What every objective has: options, checks, and a loss for the step."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is learned: the options of all objectives; each kind adds its own.

  Class attributes:
    trains_head: Whether the logits are of the classes of the data. Otherwise
      evaluators that score them are refused, and the checkpoint has no head.
    own: Start of the paths of the parameters that are not the network's, such
      as "masked_patch/"; None: it has none. `config.init` and `vit_jax.load`
      leave them out where the model has no use for them.
  """

  kind: str = ""  # the key of OBJECTIVES

  trains_head: ClassVar[bool] = True
  own: ClassVar[str | None] = None

  def errors(self) -> Iterator[str]:
    """Yields the faults that the options alone show, one text each."""
    return iter(())

  def model_errors(
    self, model: Any, image_size: tuple[int, int]
  ) -> Iterator[str]:
    """Yields why it cannot train a model on images of a size.

    Args:
      model: `config.model`, without faults.
      image_size: (height, width) in pixels, which suit the model.
    """
    return iter(())

  def start_errors(self, model: Any) -> Iterator[str]:
    """Yields why no run should start with a model; one that goes on may."""
    return iter(())

  def data_errors(self, data: Any) -> Iterator[str]:
    """Yields why it cannot learn from data.

    Args:
      data: A `batch.Data`, maybe with the attribute `is_multilabel`.
    """
    return iter(())

  def paired(self, batch: dict) -> dict:
    """Returns a global batch with what its rows need of other rows.

    The step calls it before rows are divided over devices and microbatches, so
    that `loss_fn` may treat every row by itself. Arrays that it adds have the
    rows of the batch.
    """
    return batch

  def make(self, model: Any, run_shape: Any) -> tuple[Any, Any]:
    """Returns the module that is trained, and its loss.

    Args:
      model: `config.model`.
      run_shape: `step.RunShape`, the sizes of the run.

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
        record's number batch["index"], not from the row's place. `params` are
        for the module alone: of blocks in a scan they are parts of devices
        (`models.stacking.Part`), which its body gathers.
    """
    raise NotImplementedError(type(self).__name__)

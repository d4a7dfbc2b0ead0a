"""What a run trains, and what stays fixed beside it.

The parameters of a model are divided into those that are trained, in
`TrainState.params`, and those that are not, in `TrainState.fixed`:

  frozen   parameters that config.optim.freeze names; a checkpoint has them, so
           that its model can be loaded alone
  base     the model under the adapters of config.lora; a checkpoint has only
           its address and digest
  teacher  a second model of the objective; as `base`

The trained and the frozen parameters are trees with the same keys, in which the
leaves of the other are None. jax has no leaf for None: what is frozen gets no
gradient, no update and no optimizer state.

Adapters and the frozen part are in `vit_jax.finetune`, which only the runs that
have them import.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax

from vit_jax import param_groups
from vit_jax.config import Config

if TYPE_CHECKING:
  from vit_jax.finetune.frozen import FrozenPart

FROZEN, BASE, TEACHER = "frozen", "base", "teacher"

Params = Any  # a nested dict of arrays, as flax.linen makes it


@dataclasses.dataclass(frozen=True, eq=False)
class Trainable:
  """Divides the parameters of a model, and applies a model of both parts.

  Attributes:
    config: The run; its optim.freeze and lora are used.
    frozen_part: Everything that the model applies before its first trained
      module, or None. Its output is the same in every step.
  """

  config: Config
  frozen_part: "FrozenPart | None" = None

  @classmethod
  def of(
    cls,
    config: Config,
    module: nn.Module,
    params: Params,
    image_size: tuple[int, int],
  ) -> "Trainable":
    """Returns what a run trains, with its frozen part if it has one.

    Args:
      config: The run.
      module: The module that is trained.
      params: Shapes of its parameters.
      image_size: (height, width) in pixels.
    """
    if not config.optim.freeze:
      return cls(config)
    from vit_jax.finetune import frozen

    return cls(config, frozen.part_of(config, module, params, image_size))

  def split(
    self, params: Params, key: jax.Array
  ) -> tuple[Params, dict[str, Params]]:
    """Returns the trained parameters, and the others as `TrainState.fixed`.

    Args:
      params: All parameters of the model.
      key: Random key of the adapters.

    Raises:
      ValueError: The model has no linear map for the adapters.
    """
    fixed = {}
    config = self.config
    if config.lora.rank:
      from vit_jax.finetune import lora

      params, fixed[BASE] = lora.split(
        params, config.lora, key, config.model, config.objective.own
      )
    if config.optim.freeze:
      trained = param_groups.trained(params, config.optim.freeze)
      fixed[FROZEN] = selected(params, trained, inverted=True)
      params = trained
    return params, fixed

  @contextlib.contextmanager
  def applied(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In its body, the module reads adapters, and activations as images.

    Args:
      batch: Rows of a batch. If "image" has activations of the frozen part,
        they enter the model after that part.

    Yields:
      The batch whose images the module is to be applied to.
    """
    with contextlib.ExitStack() as stack:
      if self.config.lora.rank:
        from vit_jax.finetune import lora

        stack.enter_context(lora.added(self.config.lora))
      if self.frozen_part is not None and "image" in batch:
        images = self.frozen_part.entered(batch["image"])
        batch = {**batch, "image": stack.enter_context(images)}
      yield dict(batch)

  def trains_whole(self, name: str) -> bool:
    """Whether a run with adapters trains a parameter of this name itself."""
    from vit_jax.finetune import lora

    own = self.config.objective.own
    return lora.is_trained(name, self.config.model, own)


def joined(params: Params, fixed: Mapping[str, Params]) -> Params:
  """Returns the parameters of the model: the trained, frozen and base's.

  Args:
    params: Trained parameters, or a running mean of them.
    fixed: `TrainState.fixed`.

  Example:
    >>> fixed = {"frozen": {"a": {"x": None, "y": 2}}}
    >>> joined({"a": {"x": 1, "y": None}}, fixed)
    {'a': {'x': 1, 'y': 2}}
  """
  params = saved_params(params, fixed)
  return _merged(fixed[BASE], params) if BASE in fixed else params


def saved_params(params: Params, fixed: Mapping[str, Params]) -> Params:
  """Returns the parameters that a checkpoint has: trained and frozen ones."""
  return _merged(fixed[FROZEN], params) if FROZEN in fixed else params


def without_adapters(params: Params) -> Params:
  """Returns parameters with the names of a model without adapters."""
  from vit_jax.finetune import lora

  return lora.without_factors(params)


def _merged(one: Params, other: Params) -> Params:
  """Returns a nested dict of two that have no leaf but None in common."""
  if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
    return one if other is None else other
  result = {**one, **other}
  for key in one.keys() & other.keys():
    result[key] = _merged(one[key], other[key])
  return result


def selected(tree: Params, like: Params, inverted: bool = False) -> Params:
  """Returns the leaves of a tree where another tree has a leaf, else None.

  Args:
    tree: A nested dict.
    like: Another one with the same keys.
    inverted: Whether to return the other leaves: those where `like` has None.
  """
  return jax.tree.map(
    lambda theirs, ours: ours if (theirs is None) == inverted else None,
    like,
    tree,
    is_leaf=lambda x: x is None,
  )

"""What a run makes of its objective and callbacks, without its data."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from vit_jax import step, step_checks
from vit_jax.batch import RunShape
from vit_jax.callbacks import CallbackList
from vit_jax.callbacks.named import from_names
from vit_jax.config import Config, ConfigError, ModelConfig
from vit_jax.inference import pretrained
from vit_jax.models import build
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Learner, LoadedModel
from vit_jax.zoo.families import later


@dataclasses.dataclass(frozen=True)
class Published:
  """A published model without its file: a `LoadedModel` of shapes."""

  config: ModelConfig
  params: dict[str, Any]
  num_classes: int
  image_size: tuple[int, int]

  @functools.cached_property
  def model(self) -> nn.Module:
    return build(self.config, self.num_classes)


def opened(path: str, size: tuple[int, int] | None) -> LoadedModel:
  """Returns a further model of an objective.

  A model that `vit_jax.zoo.families.later` lists is not read: its table has its
  shapes.

  Args:
    path: Anything that `vit_jax.load` reads.
    size: (height, width) of the images; None: as in their training.
  """
  known = later.published(path)
  if known is None:
    return pretrained.load_on_host(path, image_size=size)
  config = known.model
  size, classes = size or (known.pixels,) * 2, known.num_classes
  if errors := list(config.size_errors(size)):
    raise ValueError(f"{path}: {errors[0]}")
  images = jax.ShapeDtypeStruct((1, *size, config.channels), "float32")
  init = build(config, classes).init
  params = only_params(jax.eval_shape(init, jax.random.key(0), images))
  return Published(config, params, classes, size)


def learner_of(config: Config, run_shape: RunShape) -> Learner:
  """Returns what the objective makes of the model; reads its further models.

  Raises:
    ConfigError: The objective cannot make it.
  """
  objective = config.objective
  try:
    models = {
      name: opened(path, objective.models_size(run_shape.image_size))
      for name, path in objective.models().items()
    }
    errors = list(objective.make_errors(config.model, run_shape, models))
    if not errors:
      learner = objective.make(config.model, run_shape, models)
      errors = step_checks.errors(config, run_shape, learner, ())
    if not errors:
      return learner
  except (OSError, ValueError) as e:
    errors = [f"config.objective: {e}"]
  raise ConfigError(errors)


def trainer_of(
  config: Config, run_shape: RunShape, mesh: Mesh, learner: Learner
) -> step.Trainer:
  """Returns the trainer, with the callbacks that the config names.

  Raises:
    ConfigError: A callback cannot be made.
  """
  errors: list[str] = []
  observers = CallbackList(from_names(config.callbacks, errors)).observers
  if errors:
    raise ConfigError(errors)
  return step.assemble(config, run_shape, mesh, observers, learner)

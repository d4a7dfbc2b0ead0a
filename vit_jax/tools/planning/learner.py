"""What a run makes of its objective and callbacks, without its data."""

from jax.sharding import Mesh

from vit_jax import step, step_checks
from vit_jax.batch import RunShape
from vit_jax.callbacks import CallbackList
from vit_jax.callbacks.named import from_names
from vit_jax.config import Config, ConfigError
from vit_jax.inference import pretrained
from vit_jax.objectives.objective import Learner


def learner_of(config: Config, run_shape: RunShape) -> Learner:
  """Returns what the objective makes of the model; reads its further models.

  Raises:
    ConfigError: The objective cannot make it.
  """
  objective = config.objective
  try:
    models = {
      name: pretrained.load(path, verbose=False)
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

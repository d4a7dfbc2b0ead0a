"""The options of a run, their parsers and their checks. Imports no jax."""

from vit_jax.config.config_files import recipe
from vit_jax.config.parse import (
  build,
  defaults,
  flat,
  freeze,
  model_from_dict,
  options_of,
  to_dict,
)
from vit_jax.config.recipes import (
  arguments,
  check_choices,
  fewshot_evals,
  number,
  whole_number,
)
from vit_jax.config.schema import (
  HELD_OUT,
  UNIONS,
  CheckpointConfig,
  Config,
  DataConfig,
  LoRAConfig,
  MeshConfig,
  OptimConfig,
)
from vit_jax.evaluators import (
  ClassificationConfig,
  EvaluatorConfig,
  FewshotConfig,
)
from vit_jax.families import ModelConfig, model_config
from vit_jax.options import ConfigError

__all__ = (
  "HELD_OUT",
  "UNIONS",
  "CheckpointConfig",
  "ClassificationConfig",
  "Config",
  "ConfigError",
  "DataConfig",
  "EvaluatorConfig",
  "FewshotConfig",
  "LoRAConfig",
  "MeshConfig",
  "ModelConfig",
  "OptimConfig",
  "arguments",
  "build",
  "check_choices",
  "defaults",
  "fewshot_evals",
  "flat",
  "freeze",
  "model_config",
  "model_from_dict",
  "number",
  "options_of",
  "recipe",
  "to_dict",
  "whole_number",
)

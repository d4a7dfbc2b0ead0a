"""Every option of a run, and what reads and checks them; without jax."""

from vit_jax.config.parse import (
  RENAMED,
  build,
  defaults,
  freeze,
  model_from_dict,
  to_dict,
  upgraded,
)
from vit_jax.config.schema import (
  EVALUATOR_CONFIGS,
  UNIONS,
  CheckpointConfig,
  ClassificationConfig,
  Config,
  DataConfig,
  EvalConfig,
  FewshotConfig,
  MeshConfig,
  OptimConfig,
)
from vit_jax.families import ModelConfig, model_config
from vit_jax.options import ConfigError

__all__ = (
  "EVALUATOR_CONFIGS",
  "RENAMED",
  "UNIONS",
  "CheckpointConfig",
  "ClassificationConfig",
  "Config",
  "ConfigError",
  "DataConfig",
  "EvalConfig",
  "FewshotConfig",
  "MeshConfig",
  "ModelConfig",
  "OptimConfig",
  "build",
  "defaults",
  "freeze",
  "model_config",
  "model_from_dict",
  "to_dict",
  "upgraded",
)

"""Every option of a run, and what reads and checks them; without jax."""

from vit_jax.config.schema import (
  RENAMED,
  CheckpointConfig,
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimConfig,
  build,
  defaults,
  freeze,
  model_from_dict,
  to_dict,
  upgraded,
)
from vit_jax.evaluators import (
  ClassificationConfig,
  EvaluatorConfig,
  FewshotConfig,
)
from vit_jax.options import ConfigError

__all__ = (
  "RENAMED",
  "CheckpointConfig",
  "ClassificationConfig",
  "Config",
  "ConfigError",
  "DataConfig",
  "EvaluatorConfig",
  "FewshotConfig",
  "MeshConfig",
  "ModelConfig",
  "OptimConfig",
  "build",
  "defaults",
  "freeze",
  "model_from_dict",
  "to_dict",
  "upgraded",
)

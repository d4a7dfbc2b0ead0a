"""Published weights: read a file, fit it to a model, report what was done."""

from vit_jax.weights.class_matching import Head, match, some
from vit_jax.weights.fitting import (
  MAX_TOKENS,
  Report,
  adapt,
  format_report,
  model_to_finetune,
  table_grid,
  trained_at,
)
from vit_jax.weights.identify import describe, identify, num_classes
from vit_jax.weights.placing import with_weights
from vit_jax.weights.reading import read
from vit_jax.weights.weights_file import Weights

__all__ = (
  "MAX_TOKENS",
  "Head",
  "Report",
  "Weights",
  "adapt",
  "describe",
  "format_report",
  "identify",
  "match",
  "model_to_finetune",
  "num_classes",
  "read",
  "some",
  "table_grid",
  "trained_at",
  "with_weights",
)

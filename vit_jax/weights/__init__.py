"""Published weights: reads a file, fits it to a model, reports the result."""

from vit_jax.weights.fitting import (
  Report,
  adapt,
  format_report,
  model_to_finetune,
  table_grid,
  trained_at,
)
from vit_jax.weights.identification import describe, identify, num_classes
from vit_jax.weights.reading import read, read_shapes
from vit_jax.weights.weights_file import Weights, without_head

__all__ = (
  "Report",
  "Weights",
  "adapt",
  "describe",
  "format_report",
  "identify",
  "model_to_finetune",
  "num_classes",
  "read",
  "read_shapes",
  "table_grid",
  "trained_at",
  "without_head",
)

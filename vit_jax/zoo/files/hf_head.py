"""What transformers' config.json states of a head: its loss, its class names.

timm's models in transformers' files state it in the same way.
"""

from vit_jax.losses import REGRESSION

MULTI_LABEL = "multi_label_classification"
# problem_type -> loss of the head's training.
LOSSES = {
  "single_label_classification": "softmax",
  MULTI_LABEL: "sigmoid",
  REGRESSION: REGRESSION,
}
IS_REGRESSION = (
  "the head is a regression (config.json: problem_type, or a single output):"
  " its outputs are numbers, not classes."
)


def named(names: tuple[str, ...]) -> tuple[str, ...] | None:
  """Returns class names; None for LABEL_0, LABEL_1, ..., which say nothing."""
  is_named = any(name != f"LABEL_{i}" for i, name in enumerate(names))
  return names if is_named else None

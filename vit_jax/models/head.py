"""The linear map from features to logits, which all families end with."""

import flax.linen as nn
from jax.typing import DTypeLike


def head(
  num_classes: int, bias: float, dtype: DTypeLike, name: str | None = None
) -> nn.Dense:
  """Returns the layer, a submodule of the module that calls it.

  Args:
    num_classes: Logits an image.
    bias: Initial bias of every logit; the kernel starts at zero.
    dtype: Of the product, float32 at least.
    name: "head", but in a `setup`, where the attribute is the name.
  """
  return nn.Dense(
    num_classes,
    dtype=dtype,
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(bias),
    name=name,
  )

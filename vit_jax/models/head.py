"""The linear map from features to logits, with which all families end."""

import flax.linen as nn
from jax.typing import DTypeLike


def head(
  num_classes: int, bias: float, dtype: DTypeLike, name: str | None = None
) -> nn.Dense:
  """Returns the head, a submodule of the module that calls this.

  Args:
    num_classes: Number of logits per image.
    bias: Initial bias of every logit; the kernel starts at zero.
    dtype: Type of the product; float32 at least.
    name: "head"; None in a `setup`, where the attribute is the name.
  """
  return nn.Dense(
    num_classes,
    dtype=dtype,
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(bias),
    name=name,
  )

"""Layers that the families share: linear maps, patches, the head."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from vit_jax.models.chip_choices import device_of_step
from vit_jax.models.precision import bias_in_float32


def chosen(
  tokens: Shaped[Array, "#b n *d"], places: Int[Array, "b k"]
) -> Shaped[Array, "b k *d"]:
  """Returns the tokens, or patches, at the given places of each image.

  Args:
    tokens: Tokens of every image; one row, b = 1, stands for all images.
    places: Their numbers.
  """
  index = places.reshape(*places.shape, *(1,) * (tokens.ndim - 2))
  return jnp.take_along_axis(tokens, index, axis=1)


def by_rows(
  x: jax.Array,
  kernel: jax.Array,
  dimensions: tuple[Any, Any],
  **options: Any,
) -> jax.Array:
  """Returns `jax.lax.dot_general`; in a train step on a CPU, of two matrices.

  The rows of the first matrix are then the tokens of all images. Otherwise XLA
  for CPUs would copy both factors of the kernel's gradient, which is a sum over
  images and tokens. Without these copies, the step of S/16 takes 0.95 to 0.97
  of the time (benchmarks/notes/performance_log.md). A TPU does not copy.

  Args:
    x: Inputs; the sum is over the last dimensions.
    kernel: The sum is over the first dimensions.
    dimensions: As flax's layers pass them: ((dimensions of x, of the kernel),
      (none, none)).
    options: Other arguments of `jax.lax.dot_general`.
  """
  device = device_of_step()
  if device is None or device.platform != "cpu":
    return jax.lax.dot_general(x, kernel, dimensions, **options)
  num_summed = len(dimensions[0][0])
  rows, features = x.shape[:-num_summed], kernel.shape[num_summed:]
  size = math.prod(kernel.shape[:num_summed])
  out = jax.lax.dot_general(
    x.reshape(-1, size),
    kernel.reshape(size, -1),
    (((1,), (0,)), ((), ())),
    **options,
  )
  return out.reshape(*rows, *features)


# Biases are float32, and so are the results: cast them to the type of products.
Dense = functools.partial(
  nn.Dense, promote_dtype=bias_in_float32, dot_general=by_rows
)
DenseGeneral = functools.partial(
  nn.DenseGeneral, promote_dtype=bias_in_float32, dot_general=by_rows
)


def product_of_patches(
  images: Float[Array, "b h w c"],
  kernel: Float[Array, "p p c d"],
  *_,
  **__: Any,
) -> Float[Array, "b gh gw d"]:
  """Convolves with a stride equal to the kernel's size, without padding.

  Used as `nn.Conv.conv_general_dilated`. For L/16 on a TPU, the gradient of the
  convolution would be nearly a fifth of all compiled code, and slower.

  Args:
    images: Their sides are multiples of p.
    kernel: As for a convolution.
  """
  size, features = kernel.shape[0], kernel.shape[-1]
  b, h, w, c = images.shape
  x = images.reshape(b, h // size, size, w // size, size, c)
  x = x.transpose(0, 1, 3, 2, 4, 5)
  x = x.reshape(b, h // size, w // size, size * size * c)
  return x @ kernel.reshape(-1, features)


def head(
  num_classes: int, bias: float, dtype: DTypeLike, name: str | None = None
) -> nn.Dense:
  """Returns the head, as a submodule of the calling module.

  Args:
    num_classes: Number of logits per image.
    bias: Initial bias of every logit; the kernel starts at zero.
    dtype: Type of the product; at least float32.
    name: "head"; None in a `setup`, where the attribute's name is used.
  """
  return nn.Dense(
    num_classes,
    dtype=dtype,
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(bias),
    name=name,
  )

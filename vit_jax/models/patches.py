"""The embedding of patches, as a matrix product."""

from typing import Any

from jaxtyping import Array, Float


def product_of_patches(
  images: Float[Array, "b h w c"],
  kernel: Float[Array, "p p c d"],
  *_,
  **__: Any,
) -> Float[Array, "b gh gw d"]:
  """Convolves with a stride that is the kernel's size, and without padding.

  For `nn.Conv.conv_general_dilated`. On a TPU the gradient of the convolution
  is nearly a fifth of all code that the compiler makes for L/16, and slower.

  Args:
    images: Their sides are multiples of p.
    kernel: As that of a convolution.
  """
  size, features = kernel.shape[0], kernel.shape[-1]
  b, h, w, c = images.shape
  x = images.reshape(b, h // size, size, w // size, size, c)
  x = x.transpose(0, 1, 3, 2, 4, 5)
  x = x.reshape(b, h // size, w // size, size * size * c)
  return x @ kernel.reshape(-1, features)

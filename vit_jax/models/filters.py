"""The filters of a model's first layer, and their principal components."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from vit_jax.families import ModelConfig
from vit_jax.models.resnet import standardise

NUM_COMPONENTS = 28  # as in Figure 7 of arXiv:2010.11929


class Filters(NamedTuple):
  """The filters on the pixels.

  what: Their name in a sentence.
  kernel: One filter for each output channel.
  """

  what: str
  kernel: Float[np.ndarray, "h w 3 filters"]


class Components(NamedTuple):
  """Principal components, in the order of falling variance.

  images: Each of length 1, and orthogonal to the others.
  variances: Share of the filters' variance that each explains.
  """

  images: Float[np.ndarray, "k h w 3"]
  variances: Float[np.ndarray, " k"]


def first_layer(params: dict[str, Any]) -> str | None:
  """Returns the layer whose kernel has three input channels, or None."""
  for name, layer in params.items():
    shape = np.shape(layer.get("kernel")) if isinstance(layer, dict) else ()
    if len(shape) == 4 and shape[2] == 3:
      return name
  return None


def filters_of(config: ModelConfig, params: dict[str, Any]) -> Filters:
  """Returns the filters on the pixels.

  For a Transformer they are the patch embedding. For a ResNet and a hybrid they
  are the 7 x 7 filters of the ResNet's root, standardised as in the forward
  pass. (A hybrid's patch embedding does not see colours.)

  Args:
    config: The model's options.
    params: Its parameters.

  Raises:
    ValueError: The model does not begin with a convolution of pixels.
  """
  name = first_layer(params)
  if name is None:
    raise ValueError(f"{config.variant} has no filters of pixels")
  kernel = jnp.asarray(params[name]["kernel"], jnp.float32)
  what = f"the filters of {name}"
  if name == "embedding":
    what = "the projection of the patches"
  if name == "conv_root":
    what = "the 7 × 7 filters of the root"
    kernel = standardise(kernel, config.norms)
  return Filters(what, np.asarray(kernel))


def principal_components(
  kernel: Float[np.ndarray, "h w 3 filters"], most: int = NUM_COMPONENTS
) -> Components:
  """Returns the directions in which the filters differ most.

  They are the right singular vectors of the matrix whose rows are the filters
  minus their mean. The sign of a component is arbitrary; here its largest value
  is positive.

  Args:
    kernel: Filters.
    most: Largest number of components. There are also at most as many as
      filters minus 1, and as values of a filter.

  Source: arXiv:2010.11929, Figure 7 (left).
  """
  *shape, num_filters = kernel.shape
  rows = np.asarray(kernel, np.float64).reshape(-1, num_filters).T
  rows = rows - rows.mean(0)
  _, values, vectors = np.linalg.svd(rows, full_matrices=False)
  most = min(most, num_filters - 1, rows.shape[1])
  vectors, shares = vectors[:most], values**2 / max((values**2).sum(), 1e-300)
  largest = np.abs(vectors).argmax(1)
  vectors = vectors * np.sign(vectors[np.arange(most), largest])[:, None]
  return Components(
    vectors.reshape(most, *shape).astype(np.float32),
    shares[:most].astype(np.float32),
  )

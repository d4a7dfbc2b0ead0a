"""The head of DINO, and a network with heads that sees crops of several sizes.

The network's parameters have the same paths as without the objective, so that
another objective can load them. Those of a head are under its name.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.families import ModelConfig
from vit_jax.models.layers import Dense
from vit_jax.models.noise import RECORDS
from vit_jax.models.posemb import LearnedOn
from vit_jax.models.precision import at_least_float32

METHOD = "dinov2"  # how positions are resized for crops of another size
EPSILON = 1e-12  # smallest norm that a vector is divided by


def unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
  """Returns x / max(|x|, 1e-12) along the last dimension, at least float32."""
  x = x.astype(at_least_float32(x.dtype))
  squares = jnp.square(x).sum(-1, keepdims=True)
  # A square root has no gradient at 0.
  return x / jnp.sqrt(jnp.maximum(squares, EPSILON**2))


class Gain(nn.Module):
  """A factor of each prototype, 1 at first.

  It is named `kernel`, because it has weight decay in the authors' code.
  """

  @nn.compact
  def __call__(self, x: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
    ones = nn.initializers.ones
    factors = jnp.asarray(self.param("kernel", ones, (x.shape[-1],)))
    return x * jnp.expand_dims(factors, range(x.ndim - 1))


class Prototypes(nn.Module):
  """Products with k vectors of norm 1: a linear map, weight-normalised.

  The vectors are uniform in +-1 / sqrt(inputs) at first, as those of a linear
  layer of PyTorch. Their norms change how far a step of the optimizer turns
  them.

  Attributes:
    number: Number of prototypes, k.
    has_gain: Whether each has a learned factor, beginning at 1; otherwise 1.
    dtype: Type of the factors of the product; the result is float32.

  Source: arXiv:1602.07868, equation 2.
  """

  number: int
  has_gain: bool
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b k"]:
    size = x.shape[-1]
    init = nn.initializers.variance_scaling(
      1 / 3, "fan_in", "uniform", in_axis=0, out_axis=1
    )
    kernel = jnp.asarray(self.param("kernel", init, (size, self.number)))
    kernel = kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
    y = jnp.matmul(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      preferred_element_type=at_least_float32(self.dtype),
    )
    return Gain(name="gain")(y) if self.has_gain else y


def prototype_vectors(params: dict[str, Any]) -> Float[Array, "d k"]:
  """Returns the vectors of `Prototypes`, from its parameters."""
  kernel = jnp.asarray(params["kernel"])
  kernel = kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
  return kernel * params["gain"]["kernel"][None] if "gain" in params else kernel


class DINOHead(nn.Module):
  """Maps vectors to scores of prototypes.

  `layers` linear maps with exact GELU between them, the last one to
  `bottleneck`; division by the norm; products with `prototypes` unit vectors.
  Kernels are normal with a standard deviation of 0.02, biases zero.

  Attributes:
    prototypes: Number of scores.
    hidden: Width between the linear maps.
    bottleneck: Width of the vectors that are compared with the prototypes.
    layers: Number of linear maps before the prototypes, 1 or more.
    has_gain: See `Prototypes`.
    dtype: Type of the factors of matrix products; scores are float32.

  Source: arXiv:2104.14294, appendix C; facebookresearch/dino and dinov2,
    `DINOHead`.
  """

  prototypes: int
  hidden: int = 2048
  bottleneck: int = 256
  layers: int = 3
  has_gain: bool = False
  dtype: DTypeLike = "float32"

  @nn.compact
  def __call__(
    self, x: Float[Array, "*b d"], is_scored: bool = True
  ) -> Float[Array, "*b k"]:
    """Returns the scores; without `is_scored` the vectors before them."""
    # The authors' code cuts it at +-2: at 100 deviations.
    init = nn.initializers.normal(0.02)
    for i in range(self.layers):
      is_last = i == self.layers - 1
      x = Dense(
        self.bottleneck if is_last else self.hidden,
        dtype=self.dtype,
        kernel_init=init,
        name=f"Dense_{i}",
      )(x)
      if not is_last:
        x = nn.gelu(x, approximate=False).astype(self.dtype)
    prototypes = Prototypes(
      self.prototypes, self.has_gain, self.dtype, name="prototypes"
    )
    return prototypes(unit(x)) if is_scored else unit(x)

  def macs(self, width: int) -> int:
    """Returns the multiply-adds for a vector of this width."""
    widths = [width, *(self.layers - 1) * [self.hidden], self.bottleneck]
    linear = sum(a * b for a, b in zip(widths, widths[1:], strict=False))
    return linear + self.bottleneck * self.prototypes


def crop_records(records: Array, start: int, number: int, total: int) -> Array:
  """Returns a number for each crop, from which its random numbers follow.

  Args:
    records: Numbers of the records, [b].
    start: Number of the first crop among all of a record.
    number: Crops of a record, n.
    total: All crops of a record, in all views.

  Returns:
    [b n], the crops of a record one after the other.

  Example:
    >>> crop_records(jnp.array([0, 7]), 2, 3, 10)
    Array([ 2,  3,  4, 72, 73, 74], dtype=int32)
  """
  numbers = records[:, None] * total + start + jnp.arange(number)[None]
  return numbers.reshape(-1)


class MultiCrop(nn.Module):
  """A network and a head on its vectors, for images of several sizes.

  Its parameters are those of the network, and the head's under its name.

  Attributes:
    network: A network without a classifier.
    head: A module that maps vectors to scores, with the name `own` of the
      objective.
    model: The network's options.
    image_size: (height, width) in pixels of the images whose positions are
      learned. Those of other sizes are resized from them in each step.
  """

  network: nn.Module
  head: nn.Module
  model: ModelConfig
  image_size: tuple[int, int]

  preserve_adopted_names = True  # the head's

  def setup(self):
    nn.share_scope(self, self.network)

  def __call__(
    self, images: Float[Array, "b h w c"], **options: Any
  ) -> tuple[Array, dict[str, Any]]:
    """Applies the network alone; see `ViT.__call__`."""
    logits, out = self.network(images, **options)
    if self.is_initializing():
      self.scores(images, None)
    return logits, out

  def tokens(
    self, images: Float[Array, "b h w c"], records: RECORDS
  ) -> Float[Array, "b n d"]:
    """Returns the encoded tokens of a network with `embed` and `encode`.

    Args:
      images: Floats in [-1, 1], of any size that the patch divides.
      records: A number for each image; None for no dropout.
    """
    tokens, _ = self.network.embed(images)
    table = LearnedOn(self.model.grid(self.image_size), METHOD)
    encoded, _ = self.network.encode(tokens, records, table=table)
    return encoded

  def vectors(
    self, images: Float[Array, "b h w c"], records: RECORDS
  ) -> Float[Array, "b d"]:
    """Returns a vector for each image: class token, or pooled tokens.

    That of a network without `embed` and `encode` is the input of its
    classifier.
    """
    if self.model.pixel_patch is None:
      _, out = self.network(
        images, is_training=records is not None, records=records
      )
      return out["pre_logits"]
    encoded = self.tokens(images, records)
    if reads_token(self.model):
      return encoded[:, 0]
    return self.network.pool(encoded)

  def scores(
    self, images: Float[Array, "b h w c"], records: RECORDS
  ) -> tuple[Float[Array, "b k"], Float[Array, "b d"]]:
    """Returns the head's scores of each image, float32, and its vector."""
    x = self.vectors(images, records)
    return self.head(x), x


def reads_token(model: ModelConfig) -> bool:
  """Whether a vector is the class token, rather than what the network pools."""
  return bool(
    model.num_class_tokens and getattr(model, "final_norm", "") != "pooled"
  )

"""ResNets with GroupNorm and standardised kernels, as in BiT and the hybrids.

The names of the modules give the parameter paths of the published hybrids
(`block1/unit1/conv1/kernel`), in both forms:

- V1 (`bit_v1`, and the ResNet of a hybrid): norm and ReLU after a convolution,
  ReLU after the sum, padding "SAME".
- V2 (`bit`, as released by BiT): norm and ReLU before a convolution, equal
  padding on both sides, one more norm before the mean over positions.

Parameters are float32. Products have type `dtype`. The statistics of norms and
kernels are float32.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.families.resnet import (
  GROUPS,
  ROOT_CHANNELS,
  BiTConfig,
  Norms,
  Stages,
)
from vit_jax.models.layers import head
from vit_jax.models.noise import RECORDS
from vit_jax.models.precision import at_least_float32


def standardise(
  kernel: Float[Array, "h w i o"], norms: Norms
) -> Float[Array, "h w i o"]:
  """Gives every output channel's kernel mean 0 and standard deviation 1.

  Source: arXiv:1903.10520; arXiv:1912.11370, section 3.1.
  """
  axes = (0, 1, 2)
  kernel = kernel - kernel.mean(axes, keepdims=True)
  variance = jnp.square(kernel).mean(axes, keepdims=True)
  if norms.ws_eps_on == "var":
    return kernel / jnp.sqrt(variance + norms.ws_eps)
  return kernel / (jnp.sqrt(variance) + norms.ws_eps)


class StdConv(nn.Module):
  """A convolution without bias, with a standardised kernel."""

  features: int
  side: int
  stride: int
  padding: str | tuple[tuple[int, int], ...]
  norms: Norms
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x f"]:
    kernel = self.param(
      "kernel",
      nn.initializers.lecun_normal(),
      (self.side, self.side, x.shape[-1], self.features),
    )
    kernel = standardise(kernel, self.norms)
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      (self.stride, self.stride),
      self.padding,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _norm(name: str, norms: Norms, dtype: DTypeLike, **options) -> nn.GroupNorm:
  return nn.GroupNorm(
    GROUPS, epsilon=norms.gn_eps, dtype=dtype, name=name, **options
  )


class UnitV1(nn.Module):
  """1x1, 3x3 (with the stride), 1x1; the last norm's scale starts at zero."""

  channels: int
  stride: int
  norms: Norms
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x f"]:
    def conv(name, features, side, stride=1):
      return StdConv(
        features, side, stride, "SAME", self.norms, self.dtype, name=name
      )

    def norm(name, **options):
      return _norm(name, self.norms, self.dtype, **options)

    wide = 4 * self.channels
    shortcut = x
    if x.shape[-1] != wide or self.stride != 1:
      shortcut = conv("conv_proj", wide, 1, self.stride)(x)
      shortcut = norm("gn_proj")(shortcut)
    x = nn.relu(norm("gn1")(conv("conv1", self.channels, 1)(x)))
    x = nn.relu(norm("gn2")(conv("conv2", self.channels, 3, self.stride)(x)))
    x = conv("conv3", wide, 1)(x)
    x = norm("gn3", scale_init=nn.initializers.zeros)(x)
    return nn.relu(shortcut + x)


class UnitV2(nn.Module):
  """Norm and ReLU before each of 1x1, 3x3 (with the stride), 1x1."""

  channels: int
  stride: int
  norms: Norms
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x f"]:
    def conv(name, features, side, stride=1):
      pad = ((side // 2, side // 2),) * 2
      return StdConv(
        features, side, stride, pad, self.norms, self.dtype, name=name
      )

    def norm_relu(name, x):
      return nn.relu(_norm(name, self.norms, self.dtype)(x))

    wide = 4 * self.channels
    shortcut, before = x, norm_relu("gn1", x)
    if x.shape[-1] != wide or self.stride != 1:
      shortcut = conv("conv_proj", wide, 1, self.stride)(before)
    x = conv("conv1", self.channels, 1)(before)
    x = conv("conv2", self.channels, 3, self.stride)(norm_relu("gn2", x))
    x = conv("conv3", wide, 1)(norm_relu("gn3", x))
    return shortcut + x


UNITS = {"v1": UnitV1, "v2": UnitV2}


class Stage(nn.Module):
  """Units of one width; the first unit has the stride."""

  unit: Callable[..., nn.Module]
  num_units: int
  channels: int
  stride: int
  norms: Norms
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x f"]:
    for i in range(self.num_units):
      x = self.unit(
        self.channels,
        self.stride if i == 0 else 1,
        self.norms,
        self.dtype,
        name=f"unit{i + 1}",
      )(x)
    return x


def trunk(
  x: Float[Array, "b h w c"],
  form: str,
  stages: Stages,
  norms: Norms,
  dtype: DTypeLike,
  remat: Callable[[type[nn.Module]], type[nn.Module]] = lambda unit: unit,
  root_pad: str = "zero",
) -> tuple[Float[Array, "b y x f"], dict[str, Array]]:
  """Applies root and stages, as submodules of the calling module.

  The root shrinks the image by 4: a 7x7 convolution, then a 3x3 max pooling,
  both with stride 2. Every stage but the first shrinks it by 2.

  Args:
    x: Images.
    form: "v1" or "v2".
    stages: Units per stage, and the factor of all widths.
    norms: Epsilons of norms and of the standardisation.
    dtype: Type of the products.
    remat: Wraps the class of a unit, so that the backward pass recomputes it.
    root_pad: See `BiTConfig`. It matters only in V2, whose root has no ReLU
      before the max pooling.

  Returns:
    The last feature map; all feature maps by name: root, block1, block2, ...
  """
  width = round(ROOT_CHANNELS * stages.width)
  pad = "SAME" if form == "v1" else ((3, 3), (3, 3))
  x = StdConv(width, 7, 2, pad, norms, dtype, name="conv_root")(x)
  if form == "v1":
    x = nn.relu(_norm("gn_root", norms, dtype)(x))
    x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="SAME")
  else:
    # Padded before, not by max_pool, which jax2onnx writes without its padding.
    value = 0.0 if root_pad == "zero" else -jnp.inf
    sides = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = jnp.pad(x, sides, constant_values=value)
    x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))
  out = {"root": x}
  for i, num_units in enumerate(stages.blocks):
    name = f"block{i + 1}"
    x = out[name] = Stage(
      remat(UNITS[form]),
      num_units,
      width * 2**i,
      1 if i == 0 else 2,
      norms,
      dtype,
      name=name,
    )(x)
  return x, out


class ResNet(nn.Module):
  """Maps images to logits and a dict of all feature maps.

  Attributes:
    options: Options of BiT as released (V2), or of the hybrids' form (V1).
    num_classes: Number of logits per image; with 0 there is no head, and its
      input is returned.

  Source: arXiv:1912.11370, section 3; arXiv:2010.11929, section 4.1. Equal to
    big_vision's bit_paper.py (V2, `root_pad` "nothing") and bit.py (V1).
  """

  options: BiTConfig
  num_classes: int

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "b h w c"],
    *,
    is_training: bool = False,
    records: RECORDS = None,
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Applies the network.

    Args:
      images: Floats in [-1, 1].
      is_training, records: Without effect; Transformers need them.

    Returns:
      Logits, float32; the intermediates: root, block1, block2, ... [b, y, x,
      c]; encoded, the last map after its norm; pooled [b, c]; pre_logits, equal
      to pooled; logits.
    """
    del is_training, records
    options = self.options
    x, out = trunk(
      images,
      options.FORM,
      options.stages,
      options.norms,
      options.dtype,
      nn.remat if options.remat == "full" else lambda unit: unit,
      options.root_pad,
    )
    precise = at_least_float32(options.dtype)
    if options.FORM == "v2":
      x = nn.relu(_norm("norm-pre-head", options.norms, precise)(x))
    out["encoded"] = x
    x = x.astype(precise).mean(axis=(1, 2))
    out["pooled"] = out["pre_logits"] = x
    if self.num_classes:
      x = head(self.num_classes, options.head_bias, precise, "head")(x)
    out["logits"] = x
    return x, out

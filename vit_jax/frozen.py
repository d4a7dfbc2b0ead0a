"""The frozen part of a model: everything before the first trained module.

With config.optim.freeze, this part maps an image to the same activations in
every step. They can be computed once and replace the images in a batch: floats
[b, n, d], or [b, d] if only the head is trained, in place of uint8
[b, h, w, c].
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors
from flax import linen as nn
from jaxtyping import Array, Float, UInt8

from vit_jax import optim
from vit_jax.batch import normalise
from vit_jax.config import Config

# Modules behind the last block, in the order in which they are applied.
BEHIND_BLOCKS = (
  "Transformer/encoder_norm",
  "MAPHead_0",
  "pooled_norm",
  "projection",
  "pre_logits",
  "head",
)
LIMITS = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclasses.dataclass(frozen=True)
class FrozenPart:
  """Everything that a model applies before its first trained module.

  Attributes:
    model: Maps images in [-1, 1] to (logits, out).
    first_trained: Path of that module, such as "Transformer/encoderblock_6".
    image_shape: (height, width, channels) of the images.
    output: Shape and type of the activations of one image.
    is_random: Whether the model draws random numbers in training.
  """

  model: nn.Module
  first_trained: str
  image_shape: tuple[int, int, int]
  output: jax.ShapeDtypeStruct
  is_random: bool = False

  def __str__(self) -> str:
    return f"all before {self.first_trained}"

  @property
  def num_bytes(self) -> int:
    """Bytes of the activations of one image."""
    return self.output.size * self.output.dtype.itemsize

  def __call__(
    self, params: Any, images: UInt8[Array, "b h w c"]
  ) -> Float[Array, "b ..."]:
    """Returns the activations of images."""
    return _input_of(self.model, self.first_trained, params, images)


def part_of(
  config: Config, model: nn.Module, params: Any, image_size: tuple[int, int]
) -> FrozenPart | None:
  """Returns the frozen part of a model; None if it has no whole block.

  Args:
    config: Its optim.freeze, lora and model are used.
    model: The module that is trained.
    params: Shapes of its parameters.
    image_size: (height, width) in pixels.
  """
  path = None
  if config.optim.freeze and not config.lora.rank:
    path = first_trained(params, config.optim.freeze)
  if path is None:
    return None
  if getattr(config.model, "remat", "none") != "none":
    # The inputs of a module that is computed again cannot leave it.
    options = dataclasses.replace(config.model, remat="none")
    model = model.clone(options=options)
  shape = (*image_size, config.model.channels)
  images = jax.ShapeDtypeStruct((1, *shape), "uint8")
  try:
    x = jax.eval_shape(
      functools.partial(_input_of, model, path), params, images
    )
  except LookupError:  # the model has other modules
    return None
  output = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  return FrozenPart(
    model, path, shape, output, _is_random(model, params, images)
  )


def first_trained(params: Any, freeze: tuple[str, ...]) -> str | None:
  """Returns the path of the first module with a trained parameter.

  None if no block comes before that module, since caching would then save
  little; and None if the images also reach the logits by another way.

  Args:
    params: Parameters, or their shapes.
    freeze: config.optim.freeze.

  Example:
    >>> block = {"LayerNorm_0": {"scale": 0.0}}
    >>> blocks = {f"encoderblock_{i}": block for i in range(3)}
    >>> params = {"Transformer": blocks, "head": {"bias": 0.0}}
    >>> first_trained(params, ["*/encoderblock_0/*"])
    'Transformer/encoderblock_1'
    >>> first_trained(params, ["Transformer/*"])
    'head'
  """
  layers = optim.trained(optim.layers(params), freeze)
  paths = {
    jax.tree_util.keystr(path, simple=True, separator="/"): int(np.min(layer))
    for path, layer in jax.tree_util.tree_leaves_with_path(layers)
  }
  # `optim.errors` refuses to freeze all parameters.
  first, depth = min(paths.values(), default=0), optim.num_blocks(params)
  behind = [path for path, layer in paths.items() if layer > depth]
  known = tuple(f"{name}/" for name in (*BEHIND_BLOCKS, "head_dist"))
  if first <= min(depth, 1) or not all(p.startswith(known) for p in behind):
    return None
  if first <= depth:
    return f"Transformer/encoderblock_{first - 1}"
  if "head_dist" in params:  # two heads, each of which reads its own token
    has_norm = "encoder_norm" in params["Transformer"]
    return BEHIND_BLOCKS[0] if has_norm else None
  return next(
    name
    for name in BEHIND_BLOCKS
    if any(path.startswith(f"{name}/") for path in behind)
  )


@contextlib.contextmanager
def entered(
  part: FrozenPart | None, images: Array | None
) -> Iterator[Array | None]:
  """In its body, activations enter the model after its frozen part.

  Args:
    part: The frozen part, or None.
    images: Images or activations.

  Yields:
    The input to apply the model to: the images; or, for activations, images of
    NaN. The logits do not depend on these NaN, so XLA removes the computation
    of the frozen part.
  """
  if part is None or images.dtype == np.uint8:
    yield images
    return
  blank = jnp.full((len(images), *part.image_shape), jnp.nan, jnp.float32)
  with _changed_input(part.first_trained, lambda _: images):
    yield blank


def _input_of(model: nn.Module, path: str, params: Any, images: Array) -> Array:
  """Returns the first argument of a module when the model calls it.

  Raises:
    LookupError: The model does not call the module.
  """
  inputs = []

  def keep(x):
    inputs.append(x)
    return x

  with _changed_input(path, keep):
    model.apply({"params": params}, normalise(images))
  if not inputs:
    raise LookupError(path)
  return inputs[0]


def _is_random(model: nn.Module, params: Any, images: Any) -> bool:
  """Whether a model needs an rng in training, for dropout for example."""

  def apply(params, images):
    records = jnp.arange(len(images))
    return model.apply(
      {"params": params}, normalise(images), is_training=True, records=records
    )

  try:
    jax.eval_shape(apply, params, images)
  except errors.InvalidRngError:
    return True
  return False


def _changed_input(
  path: str, change: Callable[[Array], Array]
) -> contextlib.AbstractContextManager:
  """In its body, `change` is applied to the first argument of a module."""

  def intercept(apply, args, kwargs, context):
    is_call = context.method_name == "__call__"
    if is_call and "/".join(context.module.path) == path:
      args = (change(args[0]), *args[1:])
    return apply(*args, **kwargs)

  return nn.intercept_methods(intercept)


def memory() -> int:
  """Returns the bytes that the process may use, in a container its limit."""
  sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
  for path in map(pathlib.Path, LIMITS):
    with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
      sizes.append(int(path.read_text()))
  return min(sizes)

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

from vit_jax import param_groups
from vit_jax.batch import normalise
from vit_jax.config import Config, ModelConfig
from vit_jax.param_groups import path_of

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

  @contextlib.contextmanager
  def entered(self, images: Array) -> Iterator[Array]:
    """In its body, activations enter the model after its frozen part.

    Args:
      images: Images or activations.

    Yields:
      The input to apply the model to: the images; or, for activations, images
      of NaN. The logits do not depend on these NaN, so XLA removes the
      computation of the frozen part.
    """
    if images.dtype == np.uint8:
      yield images
      return
    blank = jnp.full((len(images), *self.image_shape), jnp.nan, jnp.float32)
    with _changed_input(self.first_trained, lambda _: images):
      yield blank


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
    path = first_trained(params, config.optim.freeze, config.model)
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


def first_trained(
  params: Any, freeze: tuple[str, ...], model: ModelConfig
) -> str | None:
  """Returns the path of the first module with a trained parameter.

  None if no block comes before that module, since caching would then save
  little; and None if the images also reach the logits by another way, or the
  family does not declare its modules.

  Args:
    params: Parameters, or their shapes.
    freeze: config.optim.freeze.
    model: The model of the parameters.

  Example:
    >>> from vit_jax.families import model_config
    >>> block = {"LayerNorm_0": {"scale": 0.0}}
    >>> blocks = {f"encoderblock_{i}": block for i in range(3)}
    >>> params = {"Transformer": blocks, "head": {"bias": 0.0}}
    >>> vit = model_config("vit")
    >>> first_trained(params, ("*/encoderblock_0/*",), vit)
    'Transformer/encoderblock_1'
    >>> first_trained(params, ("Transformer/*",), vit)
    'head'
  """
  layers = param_groups.trained(param_groups.layers(params, model), freeze)
  paths = {
    path_of(path): int(np.min(layer))
    for path, layer in jax.tree_util.tree_leaves_with_path(layers)
  }
  # `optim.errors` refuses to freeze all parameters.
  first = min(paths.values(), default=0)
  depth = param_groups.num_blocks(params, model)
  behind = [path for path, layer in paths.items() if layer > depth]
  if first <= min(depth, 1) or not all(map(model.is_behind_blocks, behind)):
    return None
  if first <= depth:
    return model.BLOCKS.format(first - 1)
  names = [path_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
  if len({name.split("/")[0] for name in names if model.is_head(name)}) > 1:
    # Several heads, each of which reads its own token.
    first_behind = f"{model.BEHIND_BLOCKS[0]}/"
    has_norm = any(name.startswith(first_behind) for name in names)
    return model.BEHIND_BLOCKS[0] if has_norm else None
  return next(
    (
      name
      for name in model.BEHIND_BLOCKS
      if any(path.startswith(f"{name}/") for path in behind)
    ),
    None,
  )


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

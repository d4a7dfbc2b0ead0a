"""LoRA: a frozen kernel W, plus the trained product of two low-rank factors.

A linear map y = x W + b becomes y = x W + b + s (x A) B. Here A [in, r] and B
[r, out] are trained, r is small, and s = alpha / r. A is drawn uniformly
between -1 / sqrt(in) and 1 / sqrt(in), as in PyTorch's
`kaiming_uniform_(a=sqrt(5))`. B is zero, so the model starts as its base. The
product A B is computed only to merge it into W.

The factors are the parameters `lora_a` and `lora_b` beside the kernel. The
modules do not know them: `added` intercepts their calls by flax.

Source: arXiv:2106.09685, section 4.1; peft, tuners/lora/layer.py.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from vit_jax.config import LoRAConfig
from vit_jax.families import ModelConfig

A, B = "lora_a", "lora_b"


def num_inputs(path: str, model: ModelConfig | type[ModelConfig]) -> int | None:
  """Returns how many dimensions of a map's kernel are summed, or None.

  None if the map is in no block, or its kernel is none of `model.MATRICES`.

  Example:
    >>> from vit_jax.families import model_config
    >>> block = "Transformer/encoderblock_0/"
    >>> vit = model_config("vit")
    >>> num_inputs(block + "MultiHeadDotProductAttention_0/out", vit)
    2
    >>> num_inputs("head", vit)
  """
  if model.block_of(path) is None:
    return None
  numbers = model.matrix(f"{path}/kernel")
  return numbers and numbers[0]


def split(
  params: dict[str, Any],
  options: LoRAConfig,
  key: jax.Array,
  model: ModelConfig,
  own: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Adds factors; returns the trained parameters and the frozen base.

  Args:
    params: All parameters of a model, a nested dict of arrays.
    options: `targets` names the maps that get factors.
    key: Random key for the factors A.
    model: The model, which declares its blocks, matrices and heads.
    own: Prefix of the parameters that an objective adds, or None.

  Returns:
    The new factors, the head and the objective's own parameters; the rest.

  Raises:
    ValueError: The model has no map of one of these names; or nothing declares
      its maps, or its head.
  """
  flat, family = flatten_dict(params, sep="/"), type(model).__name__
  trained = {k: v for k, v in flat.items() if is_trained(k, model, own)}
  base = {k: v for k, v in flat.items() if k not in trained}
  kernels = [k for k in base if k.endswith("/kernel")]
  names = {}  # names of all maps that may have factors
  for i, name in enumerate(sorted(kernels)):
    path = name.removesuffix("/kernel")
    if (summed := num_inputs(path, model)) is None:
      continue
    names[map_name := path.rpartition("/")[2]] = None
    if map_name not in options.targets:
      continue
    shape = base[name].shape
    start = int(model.is_scanned(name))
    blocks, end = shape[:start], start + summed
    bound = np.prod(shape[start:end]) ** -0.5
    trained[f"{path}/{A}"] = jax.random.uniform(
      jax.random.fold_in(key, i),
      (*blocks, *shape[start:end], options.rank),
      minval=-bound,
      maxval=bound,
    )
    trained[f"{path}/{B}"] = jnp.zeros((*blocks, options.rank, *shape[end:]))
  if not names:
    raise ValueError(
      f"config.lora.rank: got {options.rank}, expected 0: {family}.BLOCKS and"
      " MATRICES declare no linear maps of blocks, which get factors."
    )
  if unknown := [n for n in options.targets if n not in names]:
    raise ValueError(
      f"config.lora.targets: got {', '.join(unknown)}, expected some of"
      f" {', '.join(names)}, which the model has."
    )
  if not options.targets:
    raise ValueError(
      f"config.lora.targets: got none, expected some of {', '.join(names)}."
    )
  if not any(is_trained(k, model, own) for k in flat):
    raise ValueError(
      f"config.lora.rank: got {options.rank}, expected 0: no parameter is the"
      f" head's, which is trained as a whole ({family}.HEADS: {model.HEADS!r})."
    )
  return unflatten_dict(trained, sep="/"), unflatten_dict(base, sep="/")


def is_trained(
  name: str, model: ModelConfig | type[ModelConfig], own: str | None = None
) -> bool:
  """Whether a parameter is trained whole: the head's, or an objective's own.

  Heads are new in most runs; peft's `modules_to_save`.
  """
  return model.is_head(name) or bool(own and name.startswith(own))


def without_factors(params: Mapping) -> dict[str, Any]:
  """Returns parameters without factors, with the names of a merged model."""
  flat = flatten_dict(params, sep="/")
  others = {k: v for k, v in flat.items() if not k.endswith((A, B))}
  return unflatten_dict(others, sep="/")


def added(options: LoRAConfig) -> contextlib.AbstractContextManager:
  """In its body, linear maps with factors among their parameters add s (x A) B.

  The products have the type of the map's inputs, the sum that of its output.

  Args:
    options: `alpha` is used; the rank is that of the factors.
  """

  def add(apply, args, kwargs, context):
    y, module = apply(*args, **kwargs), context.module
    is_map = isinstance(module, nn.Dense | nn.DenseGeneral)
    if not is_map or not module.has_variable("params", A):
      return y
    (x,) = args
    a, b = (module.get_variable("params", name) for name in (A, B))
    x = x.astype(module.dtype or x.dtype)
    low = jnp.tensordot(x, a.astype(x.dtype), a.ndim - 1)
    more = jnp.tensordot(low, b.astype(x.dtype), 1)
    return (y + scale(options, a.shape[-1]) * more).astype(y.dtype)

  return nn.intercept_methods(add) if options.rank else contextlib.nullcontext()


def scale(options: LoRAConfig, rank: int) -> float:
  """Returns s = alpha / r; 1 if alpha is None."""
  return 1.0 if options.alpha is None else options.alpha / rank


def merged(
  kernel: Float[np.ndarray, "..."],
  a: Float[np.ndarray, "... r"],
  b: Float[np.ndarray, "r ..."],
  scale: float,
) -> Float[np.ndarray, "..."]:
  """Returns W + s A B of one block in W's type, computed in float64."""
  product = np.tensordot(np.asarray(a, "d"), np.asarray(b, "d"), 1)
  return (kernel + scale * product).astype(kernel.dtype)

"""LoRA adapters of a run: the file of their base, and the merged model.

A checkpoint of a run with config.lora has only the factors and the head. The
other parameters are read from the file of config.init. It must be the same file
as before: the metadata have its digest.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import LoRAConfig, ModelConfig, json_file
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import lora
from vit_jax.weights import source_file
from vit_jax.weights.identification import stated_model
from vit_jax.weights.weights_file import LazyArray, Weights


@dataclasses.dataclass(frozen=True)
class _StatedBase:
  path: str = ""
  mean: str | None = None
  digest: str = ""


@dataclasses.dataclass(frozen=True)
class _StatedConfig:
  lora: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Stated:
  base: _StatedBase = _StatedBase()
  posemb_filter: str | None = None
  config: _StatedConfig = _StatedConfig()


class Factors(NamedTuple):
  """The factors of a linear map's product, A [in..., r] and B [r, out...]."""

  a: np.ndarray
  b: np.ndarray
  scale: float


def is_on_base(metadata: Mapping[str, Any]) -> bool:
  """Whether a checkpoint with this metadata has adapters."""
  return isinstance(metadata, Mapping) and "base" in metadata


def factors_of(weights: Weights) -> dict[str, Factors]:
  """Returns path of a linear map -> its factors, from a run's checkpoint."""
  where = f"{weights.path}: metadata"
  stated = json_file.build(_Stated, weights.metadata, where)
  options = json_file.build(LoRAConfig, stated.config.lora, where)
  params = weights.params
  result = {}
  for name in [k for k in params if k.endswith(f"/{lora.A}")]:
    path = name.removesuffix(f"/{lora.A}")
    a, b = (np.asarray(params[f"{path}/{x}"]) for x in (lora.A, lora.B))
    result[path] = Factors(a, b, lora.scale(options, a.shape[-1]))
  return result


def on_base(weights: Weights, read: Callable[..., Weights]) -> Weights:
  """Returns a run's adapters merged into their base, in float32.

  Args:
    weights: A run's checkpoint: factors, head and metadata.
    read: `weights.read`.

  Raises:
    FileNotFoundError: The base does not exist any more.
    ValueError: The base has other arrays than at the run's start, or is no
      model.
  """
  where = f"{weights.path}: metadata"
  about = json_file.build(_Stated, weights.metadata, where)
  stated = about.base
  begin = f"got {weights.path!r}, the adapters of {stated.path!r}"
  try:
    base = read(stated.path, mean=stated.mean)
  except FileNotFoundError:
    raise FileNotFoundError(f"{begin}, which does not exist.") from None
  file = source_file.of_weights(base, stated.mean)
  if error := source_file.difference(file, stated.digest):
    raise ValueError(f"{begin}: {error}")
  own = base.metadata.get("objective_parameters")  # not in the network
  params = {
    k: v for k, v in base.params.items() if not (own and k.startswith(own))
  }
  options = weights.options
  model = stated_model(options)
  heads = {k: v for k, v in weights.params.items() if model.is_head(k)}
  if not options.get("pre_logits"):  # left out beside a new head
    params = without_pre_logits(params)
  if isinstance(model, ViTConfig) and "cls" in base.params:
    options = {**options, "cls_row": base.has_cls_row}
  return dataclasses.replace(
    weights,
    params=merged(params, factors_of(weights), model) | heads,
    options=options,
    grid=base.grid,
    has_cls_row=base.has_cls_row,
    posemb_filter=about.posemb_filter or base.posemb_filter,
    notes=(*weights.notes, f"adapters are merged into {stated.path}."),
  )


def without_pre_logits(
  params: Mapping[str, LazyArray],
) -> dict[str, LazyArray]:
  """Returns parameters without the tanh layer before the head."""
  return {k: v for k, v in params.items() if not k.startswith("pre_logits/")}


def merged(
  params: Mapping[str, LazyArray],
  factors: Mapping[str, Factors],
  model: ModelConfig | type[ModelConfig],
) -> dict[str, LazyArray]:
  """Returns parameters without heads, with the products added to the kernels.

  Raises:
    ValueError: A kernel is missing, or has another shape.
  """
  result = {k: v for k, v in params.items() if not model.is_head(k)}
  for path, (a, b, scale) in factors.items():
    name, shape = f"{path}/kernel", (*a.shape[:-1], *b.shape[1:])
    kernel = result.get(name)
    if kernel is None or tuple(kernel.shape) != shape:
      got = "none" if kernel is None else tuple(kernel.shape)
      raise ValueError(
        f"{name}: got {got} in the base, expected {shape} of its adapter."
      )
    add = functools.partial(_add, kernel, a, b, scale)
    result[name] = LazyArray(shape, np.dtype(np.float32), add)
  return result


def _add(
  kernel: LazyArray, a: np.ndarray, b: np.ndarray, scale: float
) -> np.ndarray:
  return lora.merged(np.asarray(kernel, np.float32), a, b, scale)

"""Types: what must stay float32, and the fastest type of matrix products."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from vit_jax.families import ModelConfig


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns float32, or float64 for float64; for statistics, softmax, heads."""
  return jnp.promote_types(dtype, jnp.float32)


def bias_in_float32(
  inputs: ArrayLike,
  kernel: ArrayLike,
  bias: ArrayLike | None,
  *,
  dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Casts inputs and kernel of a layer to `dtype`, and the bias to float32.

  It is the `promote_dtype` of flax's linear layers. Their results are then
  float32, and the caller casts them to `dtype`. The gradient of a bias is a sum
  over all rows. With a bias in bfloat16, XLA would add in bfloat16, where a
  number that is small compared to the sum so far changes nothing.
  """
  if bias is not None:
    bias = jnp.asarray(bias, at_least_float32(dtype))
  return jnp.asarray(inputs, dtype), jnp.asarray(kernel, dtype), bias


# Flags in Linux of a CPU with instructions for products of bfloat16.
BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}


def with_fastest_dtype(model: ModelConfig) -> ModelConfig:
  """Returns a Transformer with the dtype of the fastest inference here.

  ResNets and hybrids do not change, because they were not measured.
  """
  if model.pixel_patch is None:
    return model
  return dataclasses.replace(model, dtype=fastest_dtype())


def fastest_dtype() -> str:
  """Returns the dtype of a Transformer's products for the fastest inference.

  It is "bfloat16" on a CPU with instructions for it, if XLA uses them (from jax
  0.12 on). On one core, S/16 then takes 0.66 (AMD EPYC, Zen 4) or 0.54 (Intel
  Xeon with AMX) of the time of float32. On all other devices it is "float32".

  Source: measured, docs/performance.md.
  """
  version = tuple(map(int, jax.__version__.split(".")[:2]))
  if jax.default_backend() != "cpu" or version < (0, 12):
    return "float32"
  return "bfloat16" if BFLOAT16_FLAGS & cpu_flags() else "float32"


def cpu_flags() -> set[str]:
  """Returns the flags of the first CPU; none if the system lists none."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return set()
  return next(({*x.split()} for x in lines if x.startswith("flags")), set())

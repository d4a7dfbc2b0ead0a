"""Which numbers must not be rounded to bfloat16, and which products may be."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from vit_jax.families import ModelConfig


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns float32, or float64 for float64: for statistics, softmax, heads."""
  return jnp.promote_types(dtype, jnp.float32)


def bias_in_float32(
  inputs: ArrayLike,
  kernel: ArrayLike,
  bias: ArrayLike | None,
  *,
  dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Casts inputs and kernel of a layer to `dtype`; the bias has float32.

  For `promote_dtype` of flax's linear layers, whose results then have float32,
  and are to be cast to `dtype`. The gradient of a bias is a sum over all rows,
  for which flax would round the bias, and XLA would add in bfloat16: a number
  that is small beside the sum so far would change nothing.
  """
  if bias is not None:
    bias = jnp.asarray(bias, at_least_float32(dtype))
  return jnp.asarray(inputs, dtype), jnp.asarray(kernel, dtype), bias


# Flags of a CPU (Linux) that multiplies bfloat16 in units of its own.
UNITS = {"amx_bf16", "avx512_bf16"}


def fastest(model: ModelConfig) -> ModelConfig:
  """Returns a model with the type of products that answers fastest here.

  Those of ResNets and hybrids stay as they are, since they were not measured.
  """
  if model.pixel_patch is None:
    return model
  return dataclasses.replace(model, dtype=of_answers())


def of_answers() -> str:
  """Returns the type of a Transformer's products that is fastest on this CPU.

  "bfloat16" where it has units for that type and XLA uses them, which is since
  jax 0.12: on one core S/16 then takes 0.66 (AMD EPYC, Zen 4) or 0.54 (Intel
  Xeon with AMX) of the time of float32. Else, and on other devices, "float32".

  Source: docs/performance.md, measured by benchmarks/cpu_types.py.
  """
  version = tuple(map(int, jax.__version__.split(".")[:2]))
  if jax.default_backend() != "cpu" or version < (0, 12):
    return "float32"
  return "bfloat16" if UNITS & _flags() else "float32"


def _flags() -> set[str]:
  """Returns the flags of the first CPU; none where they are not told."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return set()
  return next(({*x.split()} for x in lines if x.startswith("flags")), set())

"""The table of parameters, and the JSON files of a run."""

import jax
import jax.numpy as jnp

from vit_jax.families import model_config
from vit_jax.writers import run_info

BLOCKS = "Transformer/encoderblock_*/"


def test_equal_blocks_share_a_row_of_the_table():
  kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32)
  block = {"kernel": kernel, "bias": jax.ShapeDtypeStruct((3,), jnp.float32)}
  params = {"Transformer": {f"encoderblock_{i}": block for i in range(12)}}
  params["cls"] = jax.ShapeDtypeStruct((1, 1, 3), jnp.float32)
  rows = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in run_info.parameter_table(params, model_config()).splitlines()
    if line.startswith("|")
  ]
  assert rows == [
    ["Name", "Shape", "Dtype", "Blocks", "Size"],
    [BLOCKS + "bias", "(3,)", "float32", "12", "36"],
    [BLOCKS + "kernel", "(2, 3)", "float32", "12", "72"],
    ["cls", "(1, 1, 3)", "float32", "1", "3"],
  ]

"""Adapters: the start, the products, the merge, the mesh."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import lora
from vit_jax.batch import normalise
from vit_jax.models import build
from vit_jax.models.stacking import unstack_blocks

ONE = jax.devices()[:1]
ALL = ("query", "key", "value", "out", "Dense_0", "Dense_1", "Gate")
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets=ALL)
MODERN = dict(
  model__name="modern",
  model__mlp="swiglu",
  model__rope="dinov3",
  model__posemb="none",
  model__registers=2,
  model__layer_scale=0.1,
  model__qkv_bias="no_key",
)


def _flat(tree):
  return flatten_dict(tree, sep="/")


def test_examples():
  assert doctest.testmod(lora).failed == 0


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"model__scan": True, "model__remat": "full"},
    MODERN,
    {**MODERN, "model__scan": True},
  ],
  ids=str,
)
def test_it_starts_as_its_base_and_is_merged_exactly(options):
  parts = tiny.Parts(tiny.config(**LORA, **options), ONE)
  start = parts.state()
  batch = jnp.asarray(tiny.batch(0, parts.config)["image"])
  plain = build(parts.config.model, tiny.NUM_CLASSES)
  base = lora.without_factors(start.model_params)
  # Zero factors add zeros.
  np.testing.assert_array_equal(
    parts.trainer.predict(start.eval_params, batch)[1]["pre_logits"],
    plain.apply({"params": base}, normalise(batch))[1]["pre_logits"],
  )
  before = jax.device_get(start.base)
  state, metrics = parts.run(3, start)
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  jax.tree.map(np.testing.assert_array_equal, state.base, before)
  trained = _flat(state.params)
  kinds = {k.rpartition("/")[2] for k in trained if "head" not in k}
  assert kinds == {"lora_a", "lora_b"}
  assert all(np.any(v) for k, v in trained.items() if k.endswith("lora_b"))

  flat = _flat(unstack_blocks(jax.device_get(state.model_params)))
  merged = {k: v for k, v in flat.items() if "lora" not in k}
  for name in [k for k in flat if k.endswith("lora_a")]:
    path = name.removesuffix("/lora_a")
    a, b, kernel = flat[name], flat[f"{path}/lora_b"], flat[f"{path}/kernel"]
    merged[f"{path}/kernel"] = lora.merged(kernel, a, b, scale=6 / 2)
  module = build(parts.config.model.for_inference(), tiny.NUM_CLASSES)
  got, _ = module.apply(
    {"params": unflatten_dict(merged, sep="/")}, normalise(batch)
  )
  want, _ = parts.trainer.predict(state.eval_params, batch)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  unmerged = module.apply(
    {
      "params": unstack_blocks(
        jax.device_get(lora.without_factors(state.model_params))
      )
    },
    normalise(batch),
  )[0]
  assert np.abs(unmerged - want).max() > 1e-3

"""The family `modern`: each part by its formula, and the plain ViT without."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.families import model_config
from vit_jax.models import build

TINY = dict(variant="B/4", width=32, depth=3, mlp_dim=64, num_heads=2)
IMAGES = jax.ShapeDtypeStruct((2, 16, 24, 3), "float32")


def lowered(name: str, **options) -> str:
  """Text of the gradient of a train step's forward pass."""
  model = build(model_config(name, **TINY | options), 5)
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)["params"]

  def loss(params, images, key):
    logits, _ = model.apply(
      {"params": params}, images, is_training=True, rngs={"dropout": key}
    )
    return jnp.sum(logits)

  step = jax.jit(jax.value_and_grad(loss))
  return step.lower(params, IMAGES, jax.random.key(0)).as_text()


@pytest.mark.parametrize(
  "options",
  [
    dict(dropout=0.1, stochastic_depth=0.1),
    dict(scan=True, dropout=0.1, stochastic_depth=0.1, dtype="bfloat16"),
    dict(posemb="sincos2d", remat="dots", gelu="erf"),
    dict(posemb="learn2d", cls_row=False, pre_logits=True),
    dict(variant="R+Ti/4", stage_width=0.5),
  ],
)
def test_without_parts_the_program_is_that_of_the_plain_vit(options):
  """So the plain one has no operation that a part would need."""
  assert lowered("vit", **options) == lowered("modern", **options)


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_without_class_token_the_program_is_that_of_the_plain_vit(pool):
  modern = lowered("modern", pool=pool, class_token=False)
  assert lowered("vit", pool=pool) == modern

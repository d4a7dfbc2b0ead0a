"""Models by name."""

import doctest

import pytest

from vit_jax.config import model_config, model_from_dict
from vit_jax.models import attention, build, posemb


def test_build_passes_every_option_on():
  options = dict(
    width=32,
    depth=2,
    mlp_dim=64,
    num_heads=4,
    pool="map",
    posemb="sincos2d",
    pre_logits=True,
    dropout=0.1,
    stochastic_depth=0.2,
    head_bias=-3.0,
    dtype="bfloat16",
    scan=True,
    remat="full",
  )
  result = model_config(variant="Ti/8", **options)
  assert build(result, 10).options == result
  assert {k: getattr(result, k) for k in options} == options


def test_an_unknown_model_lists_the_nearest():
  with pytest.raises(
    ValueError, match="model.name: got 'vti', expected .* Did you mean 'vit'"
  ):
    model_from_dict({"name": "vti"})


@pytest.mark.parametrize("module", [attention, posemb])
def test_examples_in_docstrings(module):
  failed, attempted = doctest.testmod(module)
  assert attempted and not failed

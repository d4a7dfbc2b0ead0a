"""What timm makes of our weights: the same logits, under its own names."""

import dataclasses

import foreign
import numpy as np
import pytest
import torch_libraries
from timm_models import AS_TIMM, RESNETS, SIZE, TINY, VIT

from vit_jax.config import model_config
from vit_jax.weights import timm as weights
from vit_jax.weights.lazy import lazy

FULL = {
  "B/16": (dict(variant="B/16"), (224, 224)),
  "R50+B/16": (dict(variant="R50+B/16", gelu="erf", **AS_TIMM), (224, 224)),
  "R50x1": (dict(name="bit", variant="R50x1", **AS_TIMM), (224, 224)),
}


@pytest.fixture(scope="module")
def timm():
  return torch_libraries.load("timm")


def _compare(timm, model, image_size, num_heads=None):
  """Checks both directions; returns errors by type."""
  name, kwargs = weights.create_call(model, 11, image_size)
  theirs = timm.create_model(name, **kwargs)
  foreign.randomise(theirs)
  grid = None
  if getattr(model, "posemb", None) == "sincos2d":
    grid = (image_size[0] // 8, image_size[1] // 8)
    params = foreign.random_params(model, 11, image_size)
    table = weights.write(params, model, grid=grid)["pos_embed"]
    theirs.load_state_dict({"pos_embed": _tensor(table)}, strict=False)
  params, options = weights.read(foreign.state(theirs), num_heads)
  options.pop("gelu", None)  # timm's default; the call may have stated tanh
  assert options.items() <= dataclasses.asdict(model).items()
  if getattr(model, "posemb", None) == "sincos2d":
    params.pop(weights.POS_EMBEDDING)
  assert not weights.differences(model)

  written = weights.write(
    {k: np.asarray(v) for k, v in params.items()}, model, grid=grid
  )
  again = timm.create_model(name, **kwargs)
  again.load_state_dict({k: _tensor(v) for k, v in written.items()})
  for key, array in theirs.state_dict().items():
    np.testing.assert_array_equal(again.state_dict()[key], array, key)

  images, errors = foreign.image(image_size), {}
  for dtype in ("float32", "float64"):
    ours = foreign.our_logits(
      dataclasses.replace(model, dtype=dtype), 11, params, images
    )
    expected = foreign.torch_logits(again, images, dtype)
    errors[dtype] = foreign.error(ours, expected)
  print(name, errors)
  return errors


def _tensor(array):
  import torch

  return torch.from_numpy(array)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIT)
def test_logits_are_timm_s(timm, name):
  errors = _compare(timm, model_config(**VIT[name]), SIZE, num_heads=3)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=pytest.mark.nightly if name == "hybrid_26" else pytest.mark.slow,
    )
    for name in RESNETS
  ],
)
def test_logits_are_those_of_timm_s_resnets(timm, name):
  fields, image_size = RESNETS[name]
  model = model_config(**fields)
  errors = _compare(timm, model, image_size, num_heads=3)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.nightly
@pytest.mark.parametrize("name", FULL)
def test_logits_are_timm_s_at_full_size(timm, name):
  fields, image_size = FULL[name]
  errors = _compare(timm, model_config(**fields), image_size)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.slow
def test_the_stated_norm_makes_other_eps_equal(timm):
  import functools

  model = model_config(**TINY, ln_eps=0.1, dtype="float64")
  name, kwargs = weights.create_call(model, 11, SIZE)
  norm = functools.partial(timm.layers.LayerNorm, eps=0.1)
  theirs = timm.create_model(name, **kwargs, norm_layer=norm)
  foreign.randomise(theirs)
  params, _ = weights.read(foreign.state(theirs), num_heads=3)
  images = foreign.image(SIZE)
  ours = foreign.our_logits(model, 11, params, images)
  expected = foreign.torch_logits(theirs, images, "float64")
  assert foreign.error(ours, expected) < 5e-6


@pytest.mark.slow
def test_timm_has_the_names(timm):
  names = [n for by_patch in weights.NAMES.values() for n in by_patch.values()]
  names += [row[-1] for row in weights.HYBRIDS] + list(weights.BITS.values())
  assert set(names) <= set(timm.list_models())


@pytest.mark.slow
def test_architectures_tell_heads_and_gelu(timm):
  read = set()
  for module in ("vision_transformer", "vision_transformer_hybrid", "deit"):
    for name in timm.list_models(module=module):
      theirs = _without_memory(timm, name)
      try:
        params, options = weights.read(
          _meta(theirs), **weights.stated({"architecture": f"{name}.tag"})
        )
      except ValueError:
        continue  # it has parts of its own, or is of no known size
      read.add(name)
      block = theirs.blocks[0]
      act = {"GELU": "erf", "GELUTanh": "tanh"}[type(block.mlp.act).__name__]
      assert options["gelu"] == act, name
      query = "encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
      heads = params[f"Transformer/{query}"].shape[1]
      assert heads == block.attn.num_heads, name
  assert {*weights.TANH, *weights.HEADS} <= read


def _without_memory(timm, name, **kwargs):
  import torch

  with torch.device("meta"):
    return timm.create_model(name, **kwargs)


def _meta(module):
  return {
    k: dataclasses.replace(lazy(np.zeros(0, np.float32)), shape=tuple(v.shape))
    for k, v in module.state_dict().items()
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  "variant", ["L/14", "H/14", "g/14", "G/14", "e/14", "So400m/14"]
)
def test_timm_s_large_sizes_are_ours(timm, variant):
  model = model_config(variant=variant, gelu="erf")
  name, kwargs = weights.create_call(model, 3, (224, 224))
  theirs = _without_memory(timm, name, weight_init="skip", **kwargs)
  params, _ = weights.read(_meta(theirs))
  shapes = foreign.shapes(model, 3, (224, 224))
  assert {k: v.shape for k, v in params.items()} == shapes

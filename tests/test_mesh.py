"""Every mesh trains as one device does, whatever divides."""

import functools
import itertools

import jax
import numpy as np
import pytest
import tiny

from vit_jax.config import Config

ONE = jax.devices()[:1]
MESHES = [
  m for m in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(m) == 8
]
# SGD: Adam divides by gradients that are nothing but rounding.
SGD = dict(optim__name="sgd", optim__lr=0.1)
MODELS = {
  "token": {},
  "gap in a scan": dict(model__pool="gap", model__scan=True),
  "odd": dict(  # 3 heads, width 36, 10 classes: hardly anything divides
    model__width=36, model__num_heads=3, model__mlp_dim=54, model__dropout=0.1
  ),
  "parts in a scan": dict(
    model__name="modern",
    model__scan=True,
    model__registers=2,
    model__rope="dinov3",
    model__posemb="none",
    model__layer_scale=0.5,
    model__mlp="swiglu",
    model__mlp_norm=True,
    model__qkv_bias="no_key",
    model__pool="token_gap",
    model__projection=16,
    model__dropout=0.1,
  ),
  "hybrid in a scan": tiny.HYBRID | dict(model__scan=True),
  # At a higher rate its losses rise and fall, and rounding grows with them.
  "resnet": tiny.RESNET | dict(optim__lr=0.01),
}


@functools.cache
def on_one_device(name: str) -> tuple[Config, list[float]]:
  config = tiny.config(**SGD | MODELS[name])
  return config, losses(tiny.Parts(config, ONE))


def losses(parts: tiny.Parts) -> list[float]:
  return [m["loss"] for m in parts.run(20)[1]]


def check(name: str, mesh: tuple[int, int, int], **changes) -> None:
  _, expected = on_one_device(name)
  data, fsdp, tensor = mesh
  config = tiny.config(
    **SGD | MODELS[name],
    **changes,
    mesh__data=data,
    mesh__fsdp=fsdp,
    mesh__tensor=tensor,
  )
  got = losses(tiny.Parts(config))
  assert got[-1] < 0.99 * got[0]
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param((1, 8, 1), marks=pytest.mark.nightly),
    pytest.param((2, 2, 2), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_transformer_of_odd_sizes(mesh):
  check("odd", mesh, optim__microbatch=1)


def _is_rare(name: str, mesh: tuple[int, int, int]) -> bool:
  """The model with most parts, on two devices along each axis, tells most."""
  return mesh != (2, 2, 2) or name != "parts in a scan"


@pytest.mark.parametrize(
  "name, mesh",
  [
    pytest.param(
      name,
      mesh,
      marks=pytest.mark.nightly if _is_rare(name, mesh) else pytest.mark.slow,
      id=f"{name}-{mesh}",
    )
    for name, mesh in itertools.product(MODELS, MESHES)
  ],
)
def test_every_mesh_has_the_losses_of_one_device(name, mesh):
  check(name, mesh)


@pytest.mark.parametrize(
  "scan, remat",
  [
    pytest.param(
      scan,
      remat,
      marks=pytest.mark.slow
      if (scan, remat) == (True, "full")
      else pytest.mark.nightly,
    )
    for scan, remat in itertools.product(
      (False, True), ("none", "dots", "full")
    )
  ],
)
def test_memory_savers_combine(scan, remat):
  """Microbatches, remat, scan, average and bfloat16 moment, all at once."""
  savers = dict(
    model__scan=scan,
    optim__ema_decay=0.9,
    optim__accumulator_dtype="bfloat16",
    model__dropout=0.1,
    model__stochastic_depth=0.2,
  )
  plain = tiny.Parts(tiny.config(**SGD, **savers), ONE)
  all_on = tiny.Parts(
    tiny.config(
      **SGD,
      **savers,
      model__remat=remat,
      optim__microbatch=1,
      mesh__data=-1,
      mesh__fsdp=-1,
    )
  )
  # A first moment in bfloat16 rounds 1e-7 up to 4e-3 where it falls on an edge.
  np.testing.assert_allclose(losses(all_on), losses(plain), rtol=1e-4)

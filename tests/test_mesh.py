"""Every mesh trains as one device does, whatever divides."""

import functools
import itertools

import numpy as np
import pytest
import tiny
from steps import ONE, assert_losses_are_close

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


def run(devices=None, **changes) -> list[dict[str, float]]:
  return tiny.Parts(tiny.config(**SGD | changes), devices).run(20)[1]


@functools.cache
def on_one_device(name: str) -> list[dict[str, float]]:
  return run(ONE, **MODELS[name])


def check(name: str, mesh: tuple[int, int, int], **changes) -> None:
  data, fsdp, tensor = mesh
  axes = dict(mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor)
  got = run(**MODELS[name], **axes, **changes)
  assert got[-1]["loss"] < 0.99 * got[0]["loss"]
  assert_losses_are_close(on_one_device(name), got)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_mesh_has_the_losses_of_one_device(name, mesh):
  check(name, mesh)


@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("scan", [False, True])
def test_memory_savers_combine(scan, remat):
  """Microbatches, remat, scan, average and bfloat16 moment, all at once."""
  changes = dict(
    model__scan=scan,
    model__dropout=0.1,
    model__stochastic_depth=0.2,
    optim__ema_decay=0.9,
    optim__accumulator_dtype="bfloat16",
  )
  mesh = dict(mesh__data=-1, mesh__fsdp=-1, optim__microbatch=1)
  all_on = run(**changes, **mesh, model__remat=remat)
  # A first moment in bfloat16 rounds 1e-7 up to 4e-3 where it falls on an edge.
  assert_losses_are_close(run(ONE, **changes), all_on, rtol=1e-4)

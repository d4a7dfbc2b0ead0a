"""The mesh, how each parameter is split, and what kinds of chips decide."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from steps import by_path

from vit_jax import devices, microbatch, run_checks, sharding
from vit_jax.config import (
  MeshConfig,
  ModelConfig,
  defaults,
  freeze,
  model_config,
)
from vit_jax.models import build
from vit_jax.models.chip_choices import CHOICES

MESH = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@functools.cache
def _shapes(model: ModelConfig):
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), "float32")
  init = build(model, 1000).init
  return jax.eval_shape(init, jax.random.key(0), images)["params"]


def _specs(model: ModelConfig, mesh=MESH):
  shapes = _shapes(model)
  of = by_path(sharding.infer(shapes, mesh, model))
  return {path: (x, of[path].spec) for path, x in by_path(shapes).items()}


@pytest.mark.parametrize(
  "mesh, devices, slices, shape",
  [
    (MeshConfig(tensor=2), 8, 1, (4, 1, 2)),
    (MeshConfig(fsdp=-1), 1, 1, (1, 1, 1)),
    (MeshConfig(fsdp=-1), 24, 1, (2, 12, 1)),
    (MeshConfig(fsdp=-1), 256, 1, (16, 16, 1)),
    (MeshConfig(data=-1, fsdp=-1), 24, 3, (3, 8, 1)),  # of a slice
  ],
)
def test_fsdp_takes_up_to_16_and_data_the_rest(mesh, devices, slices, shape):
  got = sharding.mesh_shape(mesh, devices, slices)
  assert got == dict(zip(sharding.AXES, shape, strict=True))


@pytest.mark.parametrize("mesh", [MeshConfig(tensor=3), MeshConfig(data=16)])
def test_mesh_that_does_not_fit(mesh):
  with pytest.raises(ValueError, match="does not fit 8 device"):
    sharding.make_mesh(mesh)


@pytest.fixture
def two_slices(monkeypatch):
  """Even and odd devices are of two TPU slices."""
  monkeypatch.setattr(sharding, "slice_of", lambda device: device.id % 2)


@pytest.mark.parametrize(
  "asked, shape",
  [
    (MeshConfig(), (8, 1, 1)),
    (MeshConfig(fsdp=-1), (2, 4, 1)),
    (MeshConfig(fsdp=2, tensor=2), (2, 2, 2)),
  ],
)
def test_data_alone_joins_slices(two_slices, asked, shape):
  mesh = sharding.make_mesh(asked)
  assert mesh.devices.shape == shape
  assert sharding.shape_here(asked) == dict(mesh.shape)
  of_copy = [{d.id % 2 for d in row.flat} for row in mesh.devices]
  half = shape[0] // 2
  assert of_copy == [{0}] * half + [{1}] * half


def test_a_state_does_not_span_slices(two_slices):
  config = tiny.config(mesh__data=1, mesh__fsdp=8)
  (error,) = run_checks.mesh_errors(config)
  assert error.startswith("config.mesh: ") and "multiple of 2" in error
  with pytest.raises(ValueError, match=re.escape(error)):
    sharding.make_mesh(config.mesh)


@dataclasses.dataclass(frozen=True)
class Chip:
  """What jax asks of a TPU to put it into a mesh."""

  id: int
  coords: tuple[int, int, int]
  process_index: int
  device_kind: str
  platform: str = "tpu"
  core_on_chip: int = 0
  slice_index: int = 0


def _chips(kind, sides):
  """Returns the chips of a slice, whose hosts have 2 x 2 of them."""
  places = list(itertools.product(*map(range, sides)))
  hosts = sorted({(x // 2, y // 2, z) for x, y, z in places})
  return [
    Chip(i, (x, y, z), hosts.index((x // 2, y // 2, z)), kind)
    for i, (x, y, z) in enumerate(places)
  ]


@pytest.mark.parametrize(
  "kind, sides, mesh",
  [
    # fsdp is 16: no side of the slice, and no product of sides.
    ("TPU v6 lite", (8, 8, 1), MeshConfig(fsdp=-1)),
    # jax puts an axis of four along a side, past two hosts.
    ("TPU v5 lite", (4, 4, 1), MeshConfig(tensor=4)),
    ("TPU v4", (4, 4, 4), MeshConfig(fsdp=4, tensor=4)),
  ],
)
def test_an_axis_may_be_a_part_of_a_side_of_a_slice(kind, sides, mesh):
  chips = _chips(kind, sides)
  made = sharding.make_mesh(mesh, chips)
  assert dict(made.shape) == sharding.mesh_shape(mesh, len(chips))
  assert {*made.devices.flat} == {*chips}
  assert sharding.row_errors(made) == []


@pytest.mark.parametrize(
  "nodes, mesh, expected",
  [
    (4, MeshConfig(fsdp=-1), (4, 8)),
    # A state that one node does not hold may be split over several.
    (4, MeshConfig(fsdp=16), (2, 16)),
    # Of three nodes, 16 GPUs would be two thirds.
    (3, MeshConfig(fsdp=-1), (3, 8)),
  ],
)
def test_gpus_of_a_node_share_the_state_by_default(nodes, mesh, expected):
  gpus = [
    Chip(i, (), i, "NVIDIA H100", "gpu", 0, i // 8) for i in range(8 * nodes)
  ]
  made = sharding.make_mesh(mesh, gpus)
  data, fsdp = expected
  assert dict(made.shape) == {"data": data, "fsdp": fsdp, "tensor": 1}
  if fsdp == 8:
    assert all(len({g.slice_index for g in x.flat}) == 1 for x in made.devices)


def test_every_process_holds_rows_of_its_own():
  chips = _chips("TPU v5 lite", (4, 4, 1))  # four to a host
  mesh = sharding.make_mesh(MeshConfig(tensor=8), chips)
  (error,) = sharding.row_errors(mesh)
  assert "{'data': 2, 'fsdp': 1, 'tensor': 8} on 4 processes" in error


def _on_chips(kind, variant, rows, **options):
  """Returns a config with so many rows for each of 8 chips, and their mesh."""
  c = defaults()
  c.model.name = "bit" if variant == "R50x1" else "vit"
  c.model.variant, c.optim.microbatch = variant, 64
  c.data.ops, c.data.batch_size = "decode|resize(224)", 8 * rows
  tiny.apply(c, options)
  mesh = sharding.make_mesh(MeshConfig(), _chips(kind, (2, 4, 1)))
  return freeze(c), mesh


SWIGLU = dict(model__name="modern", model__mlp="swiglu")


@pytest.mark.parametrize(
  "kind, variant, rows, options, parts",
  [
    ("TPU v5 lite", "L/16", 128, {}, 8),
    ("TPU v5 lite", "B/32", 128, SWIGLU, 4),
    ("TPU v5 lite", "L/16", 128, dict(optim__microbatch=None), 1),
    ("TPU v5 lite", "R50x1", 128, {}, 2),  # no hidden layers
    ("TPU v6 lite", "L/16", 128, {}, 2),
    ("TPU v5 lite", "L/16", 67, {}, 67),  # more than may be in the memory
  ],
)
def test_a_chip_may_take_fewer_images_at_a_time(
  kind, variant, rows, options, parts
):
  """Microbatches are not tiny without a warning."""
  config, mesh = _on_chips(kind, variant, rows, **options)
  assert microbatch.microbatches_of(config, mesh) == parts
  text = sharding.describe(config, {}, mesh)
  assert text.startswith(f"{parts} microbatch")
  assert ("config.data.batch_size" in text) == (parts == 67)


@pytest.mark.parametrize(
  "kind, variant, rows, is_few",
  [
    ("TPU v5 lite", "B/32", 16, True),
    ("TPU v4", "B/32", 16, False),
    ("TPU v5 lite", "B/32", 128, False),  # two microbatches of 64
  ],
)
def test_few_hidden_numbers_take_the_defaults_of_the_compiler(
  kind, variant, rows, is_few
):
  hidden = microbatch.hidden_of_microbatch(*_on_chips(kind, variant, rows))
  assert bool(devices.compiler_options(kind, hidden)) != is_few


def test_batches_that_do_not_divide():
  evals = {"val": {"kind": "classification", "batch_size": 12}}
  config = tiny.config(mesh__fsdp=-1, data__batch_size=20, evals=evals)
  batch, val = sharding.mesh_errors(config)  # the axes are open
  assert "config.data.batch_size: got 20" in batch
  assert "config.evals.val.batch_size: got 12" in val
  shape = {"data": 4, "fsdp": 2, "tensor": 1}
  assert sharding.batch_errors("k", 32, shape) == []
  (error,) = sharding.batch_errors("k", 36, shape)
  assert "k: got 36" in error and "such as 32" in error


def test_specs_of_a_block():
  block = "Transformer/encoderblock_3/"
  attention, mlp = "MultiHeadDotProductAttention_0/", "MlpBlock_0/"
  specs = _specs(model_config("modern", variant="S/16", depth=4, **MODERN))
  for name, spec in (
    (attention + "query/kernel", P("fsdp", "tensor", None)),
    (attention + "out/kernel", P("tensor", None, "fsdp")),
    (mlp + "Dense_0/kernel", P("fsdp", "tensor")),
    (mlp + "Dense_0/bias", P("tensor")),
    (mlp + "Gate/kernel", P("fsdp", "tensor")),  # their product needs no link
    (mlp + "Gate/bias", P("tensor")),
    ("LayerNorm_0/scale", P(None)),
  ):
    assert specs[block + name][1] == spec, name


@pytest.mark.parametrize(
  "kind, variant, shape, spec",
  [
    ("TPU v6 lite", "L/16", (16, 16, 1), P(None, "fsdp", None)),
    ("TPU v5 lite", "L/16", (16, 16, 1), P("fsdp", None, None)),
    ("TPU v6 lite", "B/16", (16, 16, 1), P("fsdp", None, None)),  # 12 heads
  ],
)
def test_some_kinds_split_heads_where_they_can(kind, variant, shape, spec):
  device = jax.sharding.AbstractDevice(kind, None, "tpu")
  mesh = jax.sharding.AbstractMesh(shape, sharding.AXES, abstract_device=device)
  specs = _specs(model_config(variant=variant, depth=4), mesh)
  key = "Transformer/encoderblock_3/MultiHeadDotProductAttention_0/query/kernel"
  assert specs[key][1] == spec


WIDE = jax.sharding.AbstractMesh((16, 16, 1), sharding.AXES)


def test_stacked_blocks_keep_their_leading_axis_whole():
  specs = _specs(model_config(variant="S/16", scan=True))
  key = "Transformer/encoderblock/MlpBlock_0/Dense_1/kernel"
  assert specs[key][1] == P(None, "tensor", "fsdp")
  # 16 divides neither 24 nor 72, but the blocks: then nothing is split.
  model = model_config(variant="S/16", depth=16, width=24, num_heads=3)
  model = dataclasses.replace(model, mlp_dim=72, scan=True)
  specs = _specs(model, WIDE)
  shape, spec = specs[key]
  assert shape.shape == (16, 72, 24) and spec == P(None, None, None)


MODERN = dict(mlp="swiglu", registers=4, layer_scale=1e-5, rope="dinov3")
EIGHT = jax.sharding.AbstractMesh((1, 8, 1), sharding.AXES)


@pytest.mark.parametrize("mesh", [EIGHT, WIDE], ids=["8", "16"])
@pytest.mark.parametrize(
  "model",
  [
    model_config(variant="S/16", pool="map", posemb="relative", scan=True),
    model_config(variant="B/16", pool="gap", scan=True),
    model_config("modern", variant="S/8", projection=512, scan=True, **MODERN),
    *(
      pytest.param(model, marks=pytest.mark.slow)
      for model in (
        model_config(variant="Ti/16"),
        model_config(variant="R50+B/16"),
        model_config("modern", variant="S/8", distilled=True),
        model_config(name="bit_v1", variant="R26x1"),
      )
    ),
  ],
  ids=lambda m: m.variant,
)
def test_less_than_a_hundredth_is_left_on_every_device(model, mesh):
  share, indivisible = sharding.left_whole(_shapes(model), mesh, model)
  assert 0 < share < 0.01
  assert "tensor" not in indivisible  # one device


def test_what_does_not_divide_goes_elsewhere_or_stays_whole_and_is_reported():
  model = model_config(variant="Ti/16")  # 3 heads, width 192
  specs = _specs(model)
  key = "Transformer/encoderblock_3/MultiHeadDotProductAttention_0/query/kernel"
  assert specs[key][1] == P("fsdp", None, None)
  _, indivisible = sharding.left_whole(_shapes(model), MESH, model)
  assert key in indivisible["tensor"] and len(indivisible["tensor"]) == 12 * 7
  # 9 does not divide 192, but the 3 * 64 of no dimension either.
  mesh = jax.sharding.AbstractMesh((1, 128, 1), sharding.AXES)
  specs = _specs(model, mesh)
  key = "Transformer/encoderblock_3/MlpBlock_0/Dense_0/kernel"
  assert specs[key][1] == P(None, "fsdp")  # 768, where 192 would be the rule
  config = tiny.config(model__variant="Ti/16", data__batch_size=1024)
  text = sharding.describe(config, _shapes(model), MESH)
  assert text.startswith("1 microbatch a step; every device holds 0.")
  assert "tensor=2 does not divide 84 leaves such as Transformer/" in text


def test_to_global_splits_rows_and_keeps_bytes():
  batch = tiny.batch(0, tiny.config())
  arrays = sharding.to_global(batch, MESH)
  assert arrays["index"].dtype == np.int32
  assert arrays["image"].dtype == np.uint8
  assert {s.data.shape[0] for s in arrays["image"].addressable_shards} == {4}
  np.testing.assert_array_equal(arrays["image"], batch["image"])


@pytest.mark.parametrize(
  "num_devices, num_images, side, expected",
  # 250,000 pixels are 5 images of 224 pixels a side, and 1.7 of 384.
  [(1, 16, 224, 4), (1, 3, 224, 3), (2, 16, 224, 16), (1, 0, 224, 0)],
)
def test_a_cpu_takes_few_images_at_a_time(
  num_devices, num_images, side, expected
):
  seen = []

  def forward(images):
    seen.append(len(images))
    return {"mean": images.mean((1, 2)), "corner": images[:, 0, 0, 0]}

  images = np.arange(num_images, dtype=np.float32)[:, None, None, None]
  images = jax.numpy.broadcast_to(images, (num_images, side, side, 3))
  out = microbatch.few_at_a_time(forward, images, jax.devices()[:num_devices])
  assert set(seen) == {expected}
  np.testing.assert_array_equal(out["corner"], np.arange(num_images))
  assert out["mean"].shape == (num_images, 3)


# Names that one pattern may take for another's; dense bfloat16, TFLOP/s.
KINDS = {
  "TPU v3": 123 / 2,  # a device is a core, half a chip
  "TPU v5": 459,
  "TPU v5 lite": 197,
  "TPU7x": 2307 / 2,
  "A100-SXM4-40GB": 312,  # by drivers before 470
  "NVIDIA A10G": 70,
  "NVIDIA L4": 242 / 2,  # "with sparsity"
  "NVIDIA L40S": 362.05,
  "NVIDIA H100 80GB HBM3": 1979 / 2,
  "NVIDIA GH200 144G HBM3e": 1979 / 2,
  "cpu": None,
  "TPU v4 lite": None,
  "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,  # a part of it
  "NVIDIA L400": None,
  "Tesla T4": None,  # no bfloat16
}


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_those_of_whole_names(kind):
  peak = KINDS[kind] and pytest.approx(KINDS[kind] * 1e12)
  assert devices.peak_flops(kind) == peak
  is_explained = peak is None and kind != "cpu"
  assert (repr(kind) in devices.unknown_peak(kind)) == is_explained


def test_choices_by_chip_are_of_chips_that_are_known():
  of_chips = devices.OPTIONS, devices.FEW_HIDDEN, devices.SPLIT_BY_HEADS
  named = {*devices.MAX_HIDDEN, *CHOICES}.union(*of_chips)
  assert named < {*devices.CHIPS} == {*devices.GENERATIONS.values()}
  assert devices.generation("TPU v6 lite") == "v6e"

"""The planner: arguments, errors, tables, cores; compiling needs libtpu."""

import dataclasses
import importlib.util
import re

import jax
import pytest
import tiny

from vit_jax import sharding
from vit_jax.batch import View
from vit_jax.config import ConfigError
from vit_jax.objectives.objective import Objective
from vit_jax.tools.planning import host_requirements, planner, programs
from vit_jax.tools.planning.plan import table
from vit_jax.tools.planning.topology import canonical, describe

PLAN = {
  "topology": "v5e:2x4",
  "chips": 8,
  "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
  "batch_size": 1024,
  "microbatches": 4,
  "remat": "dots",
  "scan": True,
  "split": "4 microbatches a step",
  "capacity_bytes": 16 * 2**30,
  "peak_bytes": 4 * 2**30,
  "fits": True,
  "argument_bytes": 2**30,
  "temporary_bytes": 3 * 2**30,
  "flops": 13.68e12,
  "bytes_accessed": 86.9e9,
  "cycles_seconds": 0.4,
  "optimal_seconds": 0.1,
  "price_seconds": 0.2,
  "collectives": {"all-reduce": [97, 753e6]},
  "images_per_second": 5120.0,
  "mfu": 0.25,
  "steps": 18_000,
  "hours": 1.0,
  "chip_hours": 8.0,
  "hosts": 2,
  "input_per_host": 2560.0,
  "input_rate": 879.0,
  "input_rate_of": "as measured",
  "input_cores": 3,
  "host_vcpus": 112,
  "price_per_chip_hour": 1.25,
  "price_unit": "USD",
  "price": 10.0,
}
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="compiles with libtpu, which only planning needs:"
  " pip install 'jax[tpu]'",
)


@pytest.mark.slow
def test_the_step_is_the_one_that_trains():
  """Its abstract arguments take a real state and a real batch."""
  config = tiny.config(num_classes=tiny.NUM_CLASSES, mesh__fsdp=2)
  parts = tiny.Parts(config)
  step, (state, batch) = planner.lower(config, parts.mesh)
  real = sharding.to_global(tiny.batch(0, config), parts.mesh)
  assert jax.tree.structure(state) == jax.tree.structure(parts.shapes)
  for wanted, given in ((batch, real), (state, parts.state())):
    for a, b in zip(
      jax.tree.leaves(wanted), jax.tree.leaves(given), strict=True
    ):
      assert (a.shape, a.dtype) == (b.shape, b.dtype)
      assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  lowered = step.lower(state, batch).as_text()
  mine = parts.train_step.lower(parts.state(), real).as_text()
  assert lowered == mine


def test_the_state_of_what_is_frozen_is_its_parameters_alone():
  """Bytes: once for the base, and for each moment again what is trained."""
  moments = 2  # of adamw
  size = lambda tree: sum(4 * x.size for x in jax.tree.leaves(tree))

  def state(**changes):
    config = tiny.config(num_classes=10, **changes)
    _, (state, _) = planner.lower(config, sharding.make_mesh(config.mesh))
    counts = size([x for x in jax.tree.leaves(state.opt_state) if not x.ndim])
    return state, programs.per_device(state) - counts - 4  # and the step

  full, full_bytes = state()
  all_ = size(full.params)
  assert full_bytes == (1 + moments) * all_
  head = size(full.params["head"])
  below = ("embedding/*", "cls", "Transformer/*")
  assert state(optim__freeze=below)[1] == all_ + moments * head
  adapted, adapted_bytes = state(lora__rank=2)
  of_maps = 2 * 2 * (32 + 32) * 2 * 4  # blocks, maps, factors, rank, bytes
  assert size(adapted.params) == of_maps + head
  assert adapted_bytes == all_ + of_maps + moments * (of_maps + head)


def _table(**changes):
  """Returns the lines of the table by their first words."""
  return {line.split()[0]: line for line in table(PLAN | changes).splitlines()}


def test_the_table():
  lines = _table()
  for name, text in (
    ("verdict", "4.00 GiB of 16.00 GiB a chip, 12.00 GiB to spare"),
    ("collectives", "97 x all-reduce 753 MB"),
    ("speed", "5,120 images/s, MFU 25.0 %"),
    ("run", "1.0 hours, 8 chip-hours"),
    ("input", "2,560 images/s on each of 2 hosts: 3 cores"),
    ("price", "10.00 USD"),
  ):
    assert text in lines[name]
  few = _table(price=None, host_vcpus=4, hosts=1, mfu=None)
  assert "price" not in few and "fewer than needed" in few["input"]
  assert "MFU" not in few["speed"]
  too_much = dict.fromkeys(planner.ESTIMATES)
  too_much |= {"fits": False, "peak_bytes": 20 * 2**30}
  assert "NOT FIT: 20.00 GiB" in _table(**too_much)["verdict"]


@pytest.mark.parametrize(
  "text",
  [
    "RESOURCE_EXHAUSTED: Used 20.50G of 15.75G hbm. Exceeded by 4.75G",
    "the total memory required for HLO temporaries (20.50G) exceeds available"
    " HBM (15.75G). HLO module: jit_train_step.",
  ],
)
def test_the_compiler_s_complaint_is_read(text):
  needed, there = planner.parse_out_of_memory(RuntimeError(text))
  assert (needed / 2**30, there / 2**30) == (20.5, 15.75)
  with pytest.raises(RuntimeError, match="something else"):
    planner.parse_out_of_memory(RuntimeError("something else"))


def test_the_length_of_the_run_needs_no_data():
  config = tiny.config(
    data__dataset="imagenet21k",
    data__split="full[51200:]",
    data__batch_size=4096,
    total_steps=None,
    total_epochs=90.0,
  )
  run_shape = planner.run_shape_of(config)
  assert run_shape.total_steps == round(90 * (14_197_122 - 51_200) / 4096)
  assert run_shape.num_classes == 21_843 and run_shape.image_size == (16, 16)
  epochs = {"total_steps": None, "total_epochs": 1.0}
  config = tiny.config(data__dataset="folder:x", **epochs)
  assert planner.run_shape_of(config).total_steps is None  # the folder tells
  images = tiny.config(data__dataset="images:x")  # have no classes
  assert planner.run_shape_of(images).num_classes == 0
  for dataset in ("somebody_s", "glyphs"):
    with pytest.raises(ValueError, match="config.num_classes: got None"):
      planner.run_shape_of(tiny.config(data__dataset=dataset))


@pytest.mark.parametrize(
  "changes, option",
  [
    ({"data__batch_size": 12}, "data.batch_size"),
    ({"mesh__data": 3}, "mesh"),
    ({"total_steps": None, "total_epochs": 1e-9}, "optim.warmup_steps"),
    ({"total_steps": None}, "total_steps"),
  ],
)
def test_an_error_is_reported_once_and_before_compiling(changes, option):
  changes = {"optim__warmup_steps": 7, **changes}
  config = tiny.config(data__dataset="cifar10", **changes)
  (error,) = planner.errors(config, jax.devices())
  assert error.startswith(f"config.{option}: ")


def test_options_that_name_nothing_are_errors_of_a_plan():
  for changes, error in (
    ({"lora__rank": 2, "lora__targets": ("Gate",)}, "lora.targets: got Gate"),
    ({"optim__freeze": ("haed/*",)}, "optim.freeze: .*matches 'haed/"),
    ({"optim__freeze": ("*",)}, "optim.freeze: .*leave some param"),
  ):
    config = tiny.config(num_classes=10, **changes)
    with pytest.raises(ConfigError, match=f"config.{error}"):
      planner.checked(config, sharding.make_mesh(config.mesh))


def test_an_unknown_length_is_longer_than_the_warm_up():
  length = {"total_steps": None, "total_epochs": 9.0, "num_classes": 3}
  config = tiny.config(
    data__dataset="folder:x", optim__warmup_steps=10_000, **length
  )
  assert not planner.errors(config, jax.devices())
  planner.lower(config, sharding.make_mesh(config.mesh))


# Cores that a host needs for its images.


def _needs(
  ops="decode_inception_crop(16)|flip_lr", dataset="imagenet2012", **k
):
  config = tiny.config(data__ops=ops, data__dataset=dataset)
  return host_requirements.needs(config, 10104.0, 4, "v5e", **k)


def test_cores_are_rounded_up():
  """10,104 images/s of 4 hosts are 2,526 each: exactly twice 1,263."""
  needs = _needs()
  assert needs["input_per_host"] == 2526.0 and needs["input_cores"] == 2
  assert needs["host_vcpus"] == 112
  assert _needs(input_rate=1262.9)["input_cores"] == 3
  needs = _needs("decode_inception_crop(16)|flip_lr|randaug(2, 15)")
  assert needs["input_rate"] == 807.0 and needs["input_cores"] == 4


@dataclasses.dataclass(frozen=True)
class Ten(Objective):
  """DINOv2's views: two of 224 px and eight of 96 px."""

  kind: str = "ten"

  trains_head = False

  def views(self, ops):
    crop = "decode|random_resized_crop({})|flip_lr"
    crop += "|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
    large, small = crop.format("224, 0.32, 1.0"), crop.format("96, 0.05, 0.32")
    return {
      "global_1": View(f"{large}|gaussian_blur(1.0)"),
      "global_2": View(f"{large}|gaussian_blur(0.1)|solarize(0.2)"),
      "local": View(f"{small}|gaussian_blur(0.5)", 8),
    }


def test_a_record_costs_what_its_views_cost():
  """DINOv2's views were measured to take 15.24 times as long as a crop."""
  config = tiny.config(data__dataset="imagenet2012")
  config = dataclasses.replace(config, objective=Ten())
  rate, _ = host_requirements.rate(config)
  plain = host_requirements.RATES["decode_inception_crop(224)|flip_lr"]
  assert plain / rate == pytest.approx(15.24, rel=0.25)


@pytest.mark.parametrize(
  "changes, word",
  [
    ({"ops": "decode_inception_crop(16)|randaug_timm(9)"}, "randaug_timm"),
    ({"dataset": "cifar10"}, "--input_rate"),  # no JPEGs
  ],
)
def test_what_was_not_measured_has_no_rate(changes, word):
  needs = _needs(**changes)
  assert needs["input_rate"] is None and needs["input_cores"] is None
  assert word in needs["input_rate_of"]
  assert _needs(**changes, input_rate=5000.0)["input_cores"] == 1


# Names of slices.

# What is wrong, and what the error suggests.
WRONG = {
  "v9:2x2": "v3, v4, v5e, v5p, v6e, tpu7x",
  "v5e:2x2,slices=two": "v5e:16x16,slices=2",
  "v5e:3x5": "v5e:4x4",
  "v5e:4x2": "v5e:2x4",
  "v5e:0x4": "v5e:1x1",
  "v5e:4x4,slices=100000": "100,000 chips",
  "v5litepod-100": "v5e:8x16",
  "v5p:16x4x4": "v5p:4x4x16",
  "v4:2x2x1,slices=2": "slices of",
}


@pytest.mark.parametrize("topology", WRONG)
def test_an_unknown_slice(topology, monkeypatch):
  """It is refused before libtpu sees it, which may end the process."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=re.escape(WRONG[topology])):
    describe(topology)


def test_names_that_users_know(monkeypatch):
  for topology, name in {
    "v5e:16x16,slices=2": "v5e:16x16,slices=2",
    "v5litepod-256": "v5e:16x16",
    "v5e-8": "v5e:2x4",
    "v6e-64,slices=4": "v6e:8x8,slices=4",
    # These count cores, two a chip.
    "v3-8": "v3:2x2",
    "v4-32": "v4:2x2x4",
    "v5p-1024": "v5p:8x8x8",
    "tpu7x-128": "tpu7x:4x4x4",
    "v7x:2x2x1": "tpu7x:2x2x1",
  }.items():
    assert canonical(topology) == name == canonical(name)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  for name in ("v4:4x4x256", "v5p:4x4x8_twisted", "v5e:1x1", "v3:32x32"):
    with pytest.raises(ConfigError, match="pip install"):
      describe(name)  # it exists, but libtpu does not


@pytest.mark.nightly
@needs_libtpu
def test_a_plan_for_two_slices_has_what_passes_between_them():
  config = tiny.config(mesh__fsdp=-1, data__dataset="digits")
  plan = planner.plan(config, "v5e:2x2,slices=2")
  assert plan["chips"] == 8 and plan["fits"]
  assert plan["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
  times, size = plan["collectives"]["between-slices"]
  # All gradients pass once, in bfloat16 or float32, a fourth from every chip;
  # tiles of a TPU make small ones larger.
  leaves = jax.tree.leaves(tiny.Parts(config).shapes.params)
  assert size > 2 * sum(x.size for x in leaves) / 4
  assert times < 2 * len(leaves)
  assert plan["cycles_seconds"] > 2 * size / 3.125e9


@pytest.mark.nightly
@needs_libtpu
@pytest.mark.parametrize(
  "topology", ["v5e:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
def test_compiled_for_a_slice(topology):
  """Also that the compiler takes the options of each chip."""
  config = tiny.config(data__dataset="cifar10", mesh__fsdp=2)
  plan = planner.plan(config, topology)
  assert plan["fits"] and plan["chips"] == 4 and plan["steps"] == 20
  assert plan["peak_bytes"] > 0 and plan["collectives"]
  assert plan["hosts"] == 1 and plan["input_cores"] is None  # of PNG

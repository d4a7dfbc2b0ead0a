"""Names of models: parameter counts, tokens, arithmetic, the printed table."""

import subprocess
import sys

import jax
import published_models
import pytest
import torch_libraries

from vit_jax.config import model_config
from vit_jax.families import PUBLISHED, by_variant, published
from vit_jax.models import build
from vit_jax.zoo.families import later
from vit_jax.zoo.families.later import LATER

ROWS = published.rows()

# Counts of the paper's own code (hybrids) and of BiT: no head at 224 px, 1,000
# classes at 224, 1,000 classes at 384 px.
COUNTS = {
  "R+Ti/16": (6_144_704, 6_337_704, 6_355_944),
  "R26+S/32": (36_046_912, 36_431_912, 36_468_392),
  "R26+B/32": (100_614_976, 101_383_976, 101_456_936),
  "R50+B/16": (97_890_112, 98_659_112, 98_950_952),
  "R50+L/32": (327_969_856, 328_994_856, 329_092_136),
  "R50x1": (23_500_352, 25_549_352, 25_549_352),
  "R50x2": (93_891_712, 97_988_712, 97_988_712),
  "R50x3": (211_174_080, 217_319_080, 217_319_080),
  "R101x1": (42_492_480, 44_541_480, 44_541_480),
  "R101x3": (381_789_888, 387_934_888, 387_934_888),
  "R152x1": (58_136_128, 60_185_128, 60_185_128),
  "R152x2": (232_238_208, 236_335_208, 236_335_208),
  "R152x4": (928_340_224, 936_533_224, 936_533_224),
  "R200x3": (562_488_000, 568_633_000, 568_633_000),
}


def shapes(name, side=224):
  """Returns the shapes of the parameters, with a head of 1,000 classes."""
  config = by_variant(name)
  images = jax.ShapeDtypeStruct((1, side, side, 3), "float32")
  model = build(config.stacked() or config, 1000)
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


def count(params):
  return sum(x.size for x in jax.tree.leaves(params))


# A trace takes as long as a network is deep.
QUICK, SLOW = ("R+Ti/16",), ("R26+S/32", "R50+B/16", "R50x1")
OTHERS = COUNTS.keys() - {*QUICK, *SLOW}


@pytest.mark.parametrize(
  "names",
  [
    QUICK,
    pytest.param(SLOW, marks=pytest.mark.slow),
    pytest.param(OTHERS, marks=pytest.mark.nightly),
  ],
  ids=["one", "few", "others"],
)
def test_parameter_counts_are_those_published(names):
  for name in names:
    params = shapes(name)
    total = count(params)
    # A ResNet is as large at any size of the images.
    large = total if "x" in name else count(shapes(name, 384))
    got = (total - count(params["head"]), total, large)
    assert got == COUNTS[name], name


@pytest.mark.parametrize(
  "name, at_224, at_384",
  [
    ("B/16", 197, 577),
    ("H/14", 257, 730),
    ("R50+L/32", 50, 145),
    # The root alone shrinks by 4, its patches of 8 by 8 more.
    ("R+Ti/16", 50, 145),
    ("R50x1", None, None),
  ],
)
def test_tokens(name, at_224, at_384):
  got = [by_variant(name).num_tokens((side, side)) for side in (224, 384)]
  assert got == [at_224, at_384]


@pytest.mark.parametrize(
  "model",
  [
    pytest.param(
      model_config(name="bit", variant="R26x0.5"), marks=pytest.mark.slow
    ),
    pytest.param(
      model_config(variant="R26+Ti/16", depth=1, stage_width=0.5),
      marks=pytest.mark.slow,
    ),
    model_config(variant="R+Ti/16", depth=1, posemb="relative", pool="map"),
  ],
  ids=lambda m: f"{m.name} {m.variant}",
)
def test_arithmetic_is_what_xla_counts(model):
  size = (96, 64)
  net = build(model, 10)
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  variables = jax.eval_shape(net.init, jax.random.key(0), images)
  lowered = jax.jit(lambda v, x: net.apply(v, x)[0]).lower(variables, images)
  counted = lowered.compile().cost_analysis()["flops"] / 2
  # XLA also counts norms, sums and activations, and leaves out the products
  # of a convolution with its padding.
  assert model.forward_macs(size, 10) == pytest.approx(counted, rel=0.12)


def test_every_name_is_a_model_and_no_file_stands_twice():
  files = [f for row in ROWS for f in row.files]
  assert len(files) == len(set(files))
  for name in PUBLISHED:
    assert by_variant(name).variant == name
  series = {row.series for row in ROWS}
  assert series == {"ViT", "BiT", *LATER}
  for one in LATER.values():
    assert one.of_one.keys() <= one.files.keys()
    for variant in one.files:
      assert not list(one.model(variant).errors())


def test_every_row_is_whole():
  for row in ROWS:
    assert row.parameters > 1e6 and row.pixels % 14 * (row.pixels % 16) == 0
    scores = [row.linear, row.zero_shot, row.knn]
    assert all(50 < x < 90 for x in scores if x is not None), row
  by_size = {}
  for row in ROWS:
    key = row.series, row.variant, row.pixels
    assert by_size.setdefault(key, row.parameters) == row.parameters


@pytest.mark.nightly
def test_list_and_page_are_up_to_date():
  assert published_models.LIST.read_text() == published_models.counted()


def test_the_page_is_up_to_date():
  """`python benchmarks/published_models.py` writes it."""
  assert published_models.PAGE.read_text() == published_models.page()


def test_the_command_prints_the_table_without_jax():
  code = (
    "import sys\nfrom vit_jax.__main__ import main\n"
    "sys.argv = ['vit-jax', 'models']\nmain()\n"
    "print(*{'jax', 'flax', 'tensorflow'} & sys.modules.keys())"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  *lines, libraries = done.stdout.splitlines()
  assert not libraries
  cells = {tuple(line.split()) for line in lines}
  assert (
    *("ViT", "B/16", "384", "86.1", "111.0", "1,000", "86.01", "apache-2.0"),
    "hf-hub:timm/vit_base_patch16_384.augreg_in21k_ft_in1k",
  ) in cells
  file = "hf-hub:timm/vit_base_patch16_siglip_256.v2_webli"
  (siglip,) = (line for line in lines if file in line)
  assert "79.1 zero-shot" in siglip
  assert sum(len(row.files) for row in ROWS) > len(lines) // 2


def test_the_files_of_a_row_are_known():
  one = later.published("hf-hub:timm/eva02_tiny_patch14_336.mim_in22k_ft_in1k")
  assert (one.model.variant, one.pixels, one.num_classes) == (
    "Ti/14",
    336,
    1000,
  )
  assert later.published("hf-hub:facebook/dinov2-base@main").num_classes == 0
  assert later.published("hf-hub:me/vit") is None


@pytest.mark.slow
def test_timm_has_the_files():
  timm = torch_libraries.load("timm")
  for row in ROWS:
    for file in row.files:
      kind, _, name = file.partition(" ")
      if kind == "timm":
        theirs = timm.models.get_pretrained_cfg(name)
        assert theirs.hf_hub_id == f"timm/{name}"
        assert theirs.input_size[1:] == (row.pixels,) * 2, name
        assert theirs.license == row.licence, name
        if row.classes:
          assert theirs.num_classes == row.classes, name

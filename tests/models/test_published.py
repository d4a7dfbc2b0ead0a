"""Names of models: parameter counts, tokens, arithmetic, the printed table."""

import jax
import pytest
import torch_libraries

from vit_jax.config import model_config
from vit_jax.families import PUBLISHED, by_variant
from vit_jax.models import build
from vit_jax.zoo import model_table as table
from vit_jax.zoo.families.later import LATER

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


# A trace takes as long as a network is deep, so the quick suite has one of
# each kind, depth or width.
QUICK = ("R+Ti/16", "R26+S/32", "R50+B/16", "R50x1")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=() if n in QUICK else pytest.mark.slow)
    for n in COUNTS
  ],
)
def test_parameter_counts_are_those_published(name):
  params = table.shapes(name)
  total = table.count(params)
  # A ResNet is as large at any size of the images.
  large = total if "x" in name else table.count(table.shapes(name, 384))
  got = (total - table.count(params["head"]), total, large)
  assert got == COUNTS[name]


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
    model_config(name="bit", variant="R26x0.5"),
    model_config(variant="R26+Ti/16", depth=1, stage_width=0.5),
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
  files = [f for fits in PUBLISHED.values() for f in fits]
  assert len(files) == len(set(files))
  for name in PUBLISHED:
    assert by_variant(name).variant == name


def test_the_table(capsys, monkeypatch):
  some = {k: PUBLISHED[k] for k in ("Ti/16", "R+Ti/16", "R26x1")}
  monkeypatch.setattr(table, "PUBLISHED", some)
  dinov3 = LATER["DINOv3"]
  dinov3 = dinov3._replace(files={"S/16": dinov3.files["S/16"]})
  monkeypatch.setattr(table, "LATER", {"DINOv3": dinov3})
  table.main()
  lines = capsys.readouterr().out.splitlines()
  assert lines[1].split() == (
    "Ti/16 5,717,416 2.5 9.4 197 577 gs://vit_models/augreg/Ti_16-*.npz".split()
  )
  assert lines[3].split()[:6] == "R+Ti/16 6,337,704 0.9 2.7 50 145".split()
  assert lines[5].split() == "R26x1 15,987,496 4.7 13.8 - - -".split()
  later = next(line for line in lines if line.startswith("DINOv3 S/16"))
  assert later.split()[2:] == (
    "21,596,160 256 12.5 261 timm"
    " vit_small_patch16_dinov3_qkvb.lvd1689m".split()
  )
  assert lines[-1].startswith("DINOv3 has a licence of its own")


def test_no_file_of_the_later_models_stands_twice():
  files = [
    f for later in LATER.values() for fs in later.files.values() for f in fs
  ]
  assert len(files) == len(set(files))
  for later in LATER.values():
    assert later.of_one.keys() <= later.files.keys()
    for variant in later.files:
      assert not list(later.model(variant).errors())


@pytest.mark.slow
def test_timm_has_the_files_of_the_later_models():
  names = torch_libraries.load("timm").list_pretrained()
  files = [
    f for later in LATER.values() for fs in later.files.values() for f in fs
  ]
  timm = [f.removeprefix("timm ") for f in files if f.startswith("timm ")]
  assert timm and not set(timm) - set(names)

"""Names of models, the list of published files, and the printed table."""

import subprocess
import sys

import published_models
import pytest
import torch_libraries

from vit_jax.families import PUBLISHED, by_variant, published
from vit_jax.zoo.families import later
from vit_jax.zoo.families.later import LATER

ROWS = published.rows()


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

"""The published scores: what the table states, and how a file is known."""

import pytest

from vit_jax.data.preprocessing import image_size
from vit_jax.families import by_variant
from vit_jax.tools.scoring import published_scores
from vit_jax.tools.scoring.published_scores import find, name_of, rows
from vit_jax.zoo.files.timm_names import published

ROWS = rows()


def test_every_row_is_whole():
  assert len(ROWS) == 87
  for row in ROWS:
    assert row.name or row.file
    assert row.source in published_scores.SOURCES
    assert (row.protocol == "timm") == (row.share is not None)
    assert image_size(row.ops) == (row.pixels, row.pixels)
    assert "imagenet2012" in row.top1
    assert all(0 < v < 100 for v in (*row.top1.values(), *row.top5.values()))
    if row.source == "timm":
      sets = "imagenet2012 real v2 a r sketch a_clean r_clean".split()
      assert list(row.top1) == sets
      # What holds for every model there is: a typing error would not.
      assert row.top1["imagenet2012"] < row.top1["real"] < row.top1["r_clean"]
      assert (
        row.top1["v2"] < row.top1["imagenet2012"] < row.top5["imagenet2012"]
      )
      assert "flexivit" in row.name or str(row.pixels) in row.name


def test_names_are_those_of_models_that_we_load():
  names = {name for _, theirs in published() for name in theirs}
  models = {name.rsplit("_", 1)[0] for name in names}
  for row in ROWS:
    if row.name:
      model = row.name.split(".")[0].rsplit("_", 1)[0]
      assert {model, model.replace("deit_", "vit_")} & models, row.name
    elif "i21k" in row.file:
      kind = row.file.split("-")[0].split("_")  # L_16, R50_L_32
      variant = "+".join(kind[:-1]) + "/" + kind[-1]
      assert by_variant(variant).size


@pytest.mark.parametrize(
  "path, name",
  [
    ("/a/vit.augreg_in21k/model.safetensors", "vit.augreg_in21k"),
    ("hf-hub:timm/vit.augreg_in21k@v1", "vit.augreg_in21k"),
    ("gs://vit_models/augreg/B_16.npz", "B_16"),
    ("model.safetensors", "model"),
    ("/a/dino/pytorch_model.bin", "dino"),
    ("vit.augreg_in21k.pth", "vit.augreg_in21k"),
  ],
)
def test_the_name_of_a_file(path, name):
  assert name_of(path) == name


def test_a_file_is_known_by_name_size_and_head():
  (sam,) = find("ViT-B_16.npz", (224, 224), 1000)
  assert sam.name == "vit_base_patch16_224.sam_in1k"
  assert sam.top1["imagenet2012"] == 80.25
  assert find("ViT-B_16.npz", (384, 384), 21_843) == ()
  assert find("ViT-B_16.npz", (384, 224), 1000) == ()
  assert find("another.npz", (224, 224), 1000) == ()
  file = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
  file += "--imagenet2012-steps_20k-lr_0.03-res_384.npz"
  published = find(f"gs://vit_models/augreg/{file}", (384, 384), 1000)
  assert [(r.source, r.top1["imagenet2012"]) for r in published] == [
    ("timm", 78.44),
    ("readme", 78.22),
  ]
  # Two fine-tunings of the same size are two files with a row each.
  ends = [r.file[-14:] for r in ROWS if r.file.startswith("B_16-i21k")]
  assert ends == ["r_0.01-res_384", "r_0.01-res_224", "r_0.03-res_384"]

"""Published checkpoints are scored as their publishers do."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from data.importable import encoded
from PIL import Image

import vit_jax
from vit_jax import evaluate, weights
from vit_jax.commands import score as score_command
from vit_jax.config import ConfigError, model_from_dict
from vit_jax.data.preprocessing import image_size
from vit_jax.data.sources import Sources
from vit_jax.families import by_variant
from vit_jax.tools.exporting import convert
from vit_jax.tools.scoring import published_scores, score
from vit_jax.tools.scoring.published_scores import find
from vit_jax.weights.eval_preprocessing import timm
from vit_jax.zoo.files.timm_names import published

NAMES = tuple("abcdefghijk")
TIMM = timm((32, 32), 0.8)
ROWS = published_scores.rows()


@pytest.fixture(scope="module")
def tiny_vit():
  """A ViT of random weights on 32 pixels, scored as timm does."""
  path = "tests/data/vit_token.weights.npz"
  vit = vit_jax.load(path, verbose=False)
  return dataclasses.replace(vit, ops=TIMM.ops, class_names=NAMES)


@pytest.fixture(scope="module")
def file(tiny_vit, tmp_path_factory):
  path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
  convert.convert(tiny_vit, str(path), "timm")
  return str(path)


def run(*argv):
  return score.run(score_command.parse(list(argv)))


def answers(vit, images):
  opened = [Image.open(io.BytesIO(data)) for data in images]
  return [answer[0].name for answer in vit.predict(opened, top=1)]


@pytest.mark.slow
def test_a_known_score(tiny_vit, file, tmp_path, capsys):
  """Labels are the model's answers to bilinear pixels; it is scored bicubic."""
  images = [encoded(i, size=(59, 45)) for i in range(24)]  # noise, in JPEG
  bilinear = dataclasses.replace(TIMM, filter="bilinear")
  labels = answers(dataclasses.replace(tiny_vit, ops=bilinear.ops), images)
  for i, (data, label) in enumerate(zip(images, labels, strict=True)):
    path = tmp_path / "data" / label / f"{i}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  pairs = zip(answers(tiny_vit, images), labels, strict=True)
  same = sum(a == b for a, b in pairs)
  assert 2 < same < 22  # so that there is something to show
  name = f"folder:{tmp_path}/data"
  result = run(file, f"--on={name}[train+val]", f"--workdir={tmp_path}/out")
  (row,) = result["scores"]
  assert row["top1"] == pytest.approx(100 * same / 24)
  assert row["images"] == 24 and row["on"] == f"{name}[train+val]"
  assert row["published_top1"] is row["difference"] is row["source"] is None
  assert row["protocol"] == f"own: {TIMM.ops}"
  assert json.loads((tmp_path / "out/score.json").read_text()) == result
  assert "no published score known" in capsys.readouterr().out


@pytest.mark.nightly
def test_all_sets_of_imagenet_on_fake_records(tiny_vit, tmp_path):
  """Each goes to its evaluator; nothing published stands beside fake scores."""
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((48, 1000), np.float32)
  head = {"kernel": kernel, "bias": np.zeros(1000, np.float32)}
  vit = dataclasses.replace(
    tiny_vit,
    params=tiny_vit.params | {"head": head},
    num_classes=1000,
    class_names=None,
  )
  path = str(tmp_path / "x.npz")
  convert.convert(vit, path, "npz")
  argv = (f"--on={','.join(score.SETS)}", "--fake_data", "--batch_size=16")
  workdir = f"--workdir={tmp_path}/out"
  result = run(path, *argv, workdir)
  rows = {row["on"]: row for row in result["scores"]}
  assert list(rows) == list(score.SETS)
  # Labels 0 to 31; two of them have no label in `real`; 9 are in A, 13 in R.
  counts = {on: row["images"] for on, row in rows.items()}
  assert counts == {
    **dict.fromkeys(("imagenet2012", "v2", "sketch"), 32),
    **dict(real=30, a=9, a_clean=9, r=13, r_clean=13),
  }
  assert all(row["source"] is None for row in rows.values())


# Which preprocessing: the file, the protocol asked for, and what is published.


def _chosen(
  kind="google", ops=None, by="auto", published=None, size=224, **model
):
  size = (size, size)
  rows = find(published, size, 1000) if published else ()
  file = weights.Weights("x", kind, {}, ops=ops)
  model = model_from_dict(model)
  return score.choose_protocol(file, model, size, by, rows)


NPZ = "ViT-B_16-224.npz"
GOOGLE = "google", "decode|resize(224)"


@pytest.mark.parametrize(
  "given, expected",
  [
    (dict(), GOOGLE),
    (dict(published=NPZ), ("timm", find(NPZ, (224, 224), 1000)[0].ops)),
    (dict(published=NPZ, by="google"), GOOGLE),
    (dict(kind="timm"), ("timm", timm((224, 224), 0.9).ops)),
    (dict(kind="timm", size=384), ("timm", timm((384, 384), 1.0).ops)),
    (
      dict(kind="timm", ops="decode|resize(224)", published=NPZ),
      ("own", "decode|resize(224)"),
    ),
    (dict(kind="checkpoint", ops="decode|inception_crop(224)|flip_lr"), GOOGLE),
    (
      dict(kind="checkpoint", ops="decode|resize(96)", by="big_vision"),
      ("big_vision", "decode|resize_small(256)|central_crop(224)"),
    ),
    (
      dict(pool="gap"),
      ("big_vision", "decode|resize_small(256)|central_crop(224)"),
    ),
    (dict(name="bit", variant="R50x1"), GOOGLE),
  ],
)
def test_the_preprocessing(given, expected):
  assert _chosen(**given) == expected


def test_a_preprocessing_that_is_not_known_is_refused():
  with pytest.raises(ValueError, match="--protocol: got own"):
    _chosen(by="own")
  deit = "deit_tiny_patch16_224.fb_in1k.safetensors"
  with pytest.raises(ValueError, match="the mean and deviation"):
    _chosen("timm", published=deit)


# What is missing.


def test_all_that_is_missing_is_named_at_once(file, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "jit", None)
  on = "--on=imagenet2012,real,a_clean"
  with pytest.raises(ConfigError) as e:
    run(file, f"{tmp_path}/none.npz", on, f"--data_dir={tmp_path}")
  words = [
    ("--on=imagenet2012:", "not prepared"),
    ("--on=real:", "not prepared"),
    ("--on=a_clean:", "not prepared"),
    (f"{tmp_path}/none.npz", "does not exist"),
  ]
  for error, (named, word) in zip(e.value.errors, words, strict=True):
    assert named in error and word in error


def test_sets():
  text = "digits[test], r,folder:/a/b[train[:5]+val[5:]]"
  assert score.sets_of(text, Sources()) == {
    "digits[test]": score.Set("digits", "test"),
    "r": score.SETS["r"],
    "folder:/a/b[train[:5]+val[5:]]": score.Set(
      "folder:/a/b", "train[:5]+val[5:]"
    ),
  }


# Published scores.


def test_every_row_is_whole():
  models = {
    name.rsplit("_", 1)[0] for _, theirs in published() for name in theirs
  }
  assert len(ROWS) == 87
  for row in ROWS:
    assert row.source in published_scores.SOURCES
    assert (row.protocol == "timm") == (row.share is not None)
    assert image_size(row.ops) == (row.pixels, row.pixels)
    assert all(0 < v < 100 for v in (*row.top1.values(), *row.top5.values()))
    if row.source == "timm":
      sets = "imagenet2012 real v2 a r sketch a_clean r_clean".split()
      assert list(row.top1) == sets
      # What holds for every model there is: a typing error would not.
      top1 = row.top1["imagenet2012"]
      assert row.top1["v2"] < top1 < row.top5["imagenet2012"]
      assert top1 < row.top1["real"] < row.top1["r_clean"]
    # Its name is that of a model that we load.
    if row.name:
      model = row.name.split(".")[0].rsplit("_", 1)[0]
      assert {model, model.replace("deit_", "vit_")} & models, row.name
    elif "i21k" in row.file:
      kind = row.file.split("-")[0].split("_")  # L_16, R50_L_32
      assert by_variant("+".join(kind[:-1]) + "/" + kind[-1]).size
    else:
      assert row.file


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
  assert published_scores.name_of(path) == name


def test_a_file_is_known_by_name_size_and_head():
  (sam,) = find("ViT-B_16.npz", (224, 224), 1000)
  assert sam.name == "vit_base_patch16_224.sam_in1k"
  assert sam.top1["imagenet2012"] == 80.25
  assert find("ViT-B_16.npz", (384, 384), 21_843) == ()
  assert find("ViT-B_16.npz", (384, 224), 1000) == ()
  assert find("another.npz", (224, 224), 1000) == ()
  # Two fine-tunings of the same size are two files with a row each.
  file = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
  file += "--imagenet2012-steps_20k-lr_0.03-res_384.npz"
  rows = find(f"gs://vit_models/augreg/{file}", (384, 384), 1000)
  assert [(r.source, r.top1["imagenet2012"]) for r in rows] == [
    ("timm", 78.44),
    ("readme", 78.22),
  ]


def test_published_scores_are_shown_beside_ours(monkeypatch):
  rows = find(NPZ, (224, 224), 1000)
  config = score.Config(data=score.DataConfig(ops="another"))
  task = score.Task(NPZ, config, {"v2": "v2"}, "", rows)
  scores = {"v2/top1": 0.7, "v2/top5": 0.9, "v2/count": 3}
  monkeypatch.setattr(evaluate, "record", lambda *_, **__: {"scores": scores})
  (row,) = score.rows_of(task, Sources())
  assert row["published_top1"] == 71.07
  assert row["difference"] == pytest.approx(70 - 71.07)
  assert not row["same_pixels"] and row["source"].startswith("timm's")

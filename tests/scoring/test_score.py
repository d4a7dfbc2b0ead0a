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
from vit_jax.data.sources import Sources
from vit_jax.tools.exporting import convert
from vit_jax.tools.scoring import published_scores, score
from vit_jax.weights import eval_preprocessing

NAMES = tuple("abcdefghijk")
TIMM = eval_preprocessing.timm((32, 32), 0.8)


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


def errors(*argv):
  with pytest.raises(ConfigError) as e:
    run(*argv)
  return e.value.errors


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


def _config(ops, **model):
  return dataclasses.replace(
    score.Config(),
    model=model_from_dict(model),
    data=score.DataConfig(ops=ops),
    evals=(score.EVALUATORS["classification"](ops=ops),),
  )


# Which preprocessing.


def _weights(kind, ops=None):
  return weights.Weights("x", kind, {}, ops=ops)


ROW = published_scores.find("ViT-B_16-224.npz", (224, 224), 1000)


@pytest.mark.parametrize(
  "file, by, published, expected",
  [
    (_weights("google"), "auto", (), ("google", "decode|resize(224)")),
    (_weights("google"), "auto", ROW, ("timm", ROW[0].ops)),
    (_weights("google"), "google", ROW, ("google", "decode|resize(224)")),
    (
      _weights("timm"),
      "auto",
      (),
      ("timm", eval_preprocessing.timm((224, 224), 0.9).ops),
    ),
    (
      _weights("timm", "decode|resize(224)"),
      "auto",
      ROW,
      ("own", "decode|resize(224)"),
    ),
    (
      _weights("checkpoint", "decode|inception_crop(224)|flip_lr"),
      "auto",
      (),
      ("google", "decode|resize(224)"),
    ),
    (
      _weights("checkpoint", "decode|resize(96)"),  # that of another size
      "big_vision",
      (),
      ("big_vision", "decode|resize_small(256)|central_crop(224)"),
    ),
  ],
)
def test_the_preprocessing(file, by, published, expected):
  model = model_from_dict({"name": "vit"})
  size = (224, 224)
  assert score.choose_protocol(file, model, size, by, published) == expected


def test_the_preprocessing_of_formats():
  def chosen(kind="google", size=(224, 224), by="auto", published=(), **model):
    config = model_from_dict(model)
    return score.choose_protocol(_weights(kind), config, size, by, published)

  assert chosen(pool="gap")[0] == "big_vision"
  assert chosen(name="bit", variant="R50x1")[0] == "google"
  _, ops = chosen("timm", (384, 384))
  assert ops == eval_preprocessing.timm((384, 384), 1.0).ops
  with pytest.raises(ValueError, match="--protocol: got own"):
    chosen(by="own")
  deit = published_scores.find(
    "deit_tiny_patch16_224.fb_in1k.safetensors", (224, 224), 1000
  )
  with pytest.raises(ValueError, match="the mean and deviation"):
    chosen("timm", published=deit)


# What is missing, and tables.


def test_all_that_is_missing_is_named_at_once(file, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "jit", None)
  folder = f"--data_dir={tmp_path}"
  on = "--on=imagenet2012,real,a_clean"
  messages = errors(file, f"{tmp_path}/none.npz", on, folder)
  words = [
    ("--on=imagenet2012:", "not prepared"),
    ("--on=real:", "not prepared"),
    ("--on=a_clean:", "not prepared"),
    (f"{tmp_path}/none.npz", "does not exist"),
  ]
  for error, (named, word) in zip(messages, words, strict=True):
    assert named in error and word in error


def test_sets():
  opened = Sources()
  text = "digits[test], r,folder:/a/b[train[:5]+val[5:]]"
  assert score.sets_of(text, opened) == {
    "digits[test]": score.Set("digits", "test"),
    "r": score.SETS["r"],
    "folder:/a/b[train[:5]+val[5:]]": score.Set(
      "folder:/a/b", "train[:5]+val[5:]"
    ),
  }


def test_published_scores_are_shown_beside_ours(monkeypatch):
  """A row of a file is that of the same preprocessing, where there is one."""
  task = score.Task("ViT-B_16-224.npz", _config("x"), {"v2": "v2"}, "", ROW)
  monkeypatch.setattr(
    evaluate,
    "record",
    lambda *_, **__: {
      "scores": {"v2/top1": 0.7, "v2/top5": 0.9, "v2/count": 3}
    },
  )
  (row,) = score.rows_of(task, Sources())
  assert row["published_top1"] == 71.07
  assert row["difference"] == pytest.approx(70 - 71.07)
  assert not row["same_pixels"] and row["source"].startswith("timm's")
  by_google = _config("decode|resize(224)")
  ordered = sorted(ROW, key=lambda r: r.ops != by_google.data.ops)
  assert [r.source for r in ordered] == ["readme", "timm"]

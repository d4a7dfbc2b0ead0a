"""Published checkpoints are scored, and each step of it explained."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import planted
import pytest

import vit_jax
from vit_jax import evaluate, weights
from vit_jax.commands import score as score_command
from vit_jax.config import ConfigError, model_from_dict
from vit_jax.data.sources import Sources
from vit_jax.tools.exporting import convert
from vit_jax.tools.scoring import explain, published_scores, score
from vit_jax.tools.scoring.ablation import STEPS, swaps
from vit_jax.weights import eval_preprocessing

NAMES = tuple("abcdefghijk")
TRIAL = ("--fake_data", "--batch_size=8", "--workdir")
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


def test_help_has_every_name(capsys):
  with pytest.raises(SystemExit):
    score_command.parse(["--help"])
  texts = {*re.findall(r"\w+", capsys.readouterr().out)}
  assert {*STEPS, *score.SETS, score.AVAILABLE} <= texts


def errors(*argv):
  with pytest.raises(ConfigError) as e:
    run(*argv)
  return e.value.errors


@pytest.mark.slow
def test_files_of_one_name_are_told_apart(file, tmp_path):
  other = tmp_path / "tiny.safetensors"
  shutil.copy(file, other)
  result = run(file, str(other), "--on=digits[test]", *TRIAL, str(tmp_path))
  assert [row["file"] for row in result["scores"]] == [file, str(other)]


# Planted differences.


@pytest.mark.slow
def test_a_planted_filter_is_weights(tiny_vit, file, tmp_path, capsys):
  """Labels are the model's answers to bilinear pixels; it is scored bicubic."""
  images = planted.at_the_boundary(tiny_vit, 24, num_digits=60)
  bilinear = dataclasses.replace(TIMM, filter="bilinear")
  answers = [
    planted.answers(dataclasses.replace(tiny_vit, ops=path.ops), images)
    for path in (TIMM, bilinear)
  ]
  same = sum(a == b for a, b in zip(*answers, strict=True))
  assert 2 < same < 22  # so that there is something to show
  name = planted.write(tmp_path / "data", images, answers[1])
  result = run(
    file,
    f"--on={name}[train+val]",
    *("--explain", "--steps=filter"),
    f"--workdir={tmp_path}/out",
  )
  (row,) = result["scores"]
  assert row["top1"] == pytest.approx(100 * same / 24)
  assert row["images"] == 24 and row["on"] == f"{name}[train+val]"
  assert row["published_top1"] is row["difference"] is row["source"] is None
  assert row["protocol"] == f"own: {TIMM.ops}"
  (swap,) = result["explained"]
  assert swap["top1"] == 100
  assert swap["gained"] == swap["other"] == 24 - same and swap["lost"] == 0
  assert (swap["step"], swap["was"]) == ("filter", "bicubic")
  assert swap["value"] == "bilinear"
  assert json.loads((tmp_path / "out/score.json").read_text()) == result
  out = capsys.readouterr().out
  cells = f"+{24 - same} -0 {24 - same} of 24".split()
  assert any(line.split()[-5:] == cells for line in out.splitlines())
  assert "no published score known by this name" in out


@pytest.mark.nightly
def test_every_planted_step_is_weights(tiny_vit, file, tmp_path):
  """For each step: labels by which it alone explains the loss, to the image.

  What any other swap must give is known as well: the share of images to which
  it gives the planted answers.
  """
  images = planted.at_the_boundary(tiny_vit, 100)
  answers = planted.answers(tiny_vit, images)
  name = planted.write(tmp_path / "data", images, answers)
  on = f"--on={name}[train+val]"
  result = run(file, on, "--explain", f"--workdir={tmp_path}/out")
  assert result["scores"][0]["top1"] == 100
  for row in result["explained"]:
    assert row["gained"] == 0 and row["lost"] == row["other"]
  lost = {(r["step"], r["value"]): r["lost"] for r in result["explained"]}
  # Seen with jax 0.10.2: 37 by the decoder's transform, 24 by its upsampling,
  # 42 by the filter, 48 to 54 by crops, 3 by gelu, 25 by bfloat16. An epsilon
  # of 1e-12 changes these variances as little as 1e-6 does.
  assert {step for step, _ in lost} == {*STEPS} - {"resnet_eps"}
  assert all(n > 0 for (_, value), n in lost.items() if value != "1e-12")
  # Answers to each record with each swap; records as `answers` has them.
  task, _ = score.task_of(file, score.sets_of(on[5:], Sources()))
  source = Sources().open(name, "train+val")
  paths = [source.record_name(i) for i in range(len(images))]
  order = [int(path.split("/")[-1][:4]) for path in paths]
  by_swap = {}
  for swap in swaps(task.config):
    ready = evaluate.open_checkpoint(swap.config, file)
    hits = ready.evaluators[0].hits(ready.params)
    at = np.empty(len(images), int)
    at[order] = hits["prediction"]
    by_swap[swap.step, swap.value] = at
  planted_ones = [
    *(("dct", "fast"), ("antialiasing", "off, by tensorflow")),
    *(("crop", "0.875"), ("products", "bfloat16")),
  ]
  for key in planted_ones:
    labels = [NAMES[k] for k in by_swap[key]]
    planted.write(tmp_path / "data", images, labels)
    steps = f"--steps={key[0]},gelu"
    result = run(file, on, "--explain", steps, f"--workdir={tmp_path}/out")
    assert result["scores"][0]["top1"] == pytest.approx(100 - lost[key])
    for row in result["explained"]:
      other = by_swap[row["step"], row["value"]]
      right = (other == by_swap[key]).mean()
      assert row["top1"] == pytest.approx(100 * right)
      assert (row["top1"] == 100) == ((row["step"], row["value"]) == key)


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
  result = run(path, *argv, workdir, "--explain", "--steps=gelu")
  rows = {row["on"]: row for row in result["scores"]}
  assert list(rows) == list(score.SETS)
  # Labels 0 to 31; two of them have no label in `real`; 9 are in A, 13 in R.
  counts = {on: row["images"] for on, row in rows.items()}
  assert counts == {
    **dict.fromkeys(("imagenet2012", "v2", "sketch"), 32),
    **dict(real=30, a=9, a_clean=9, r=13, r_clean=13),
  }
  assert all(row["source"] is None for row in rows.values())
  images = {r["on"]: r["images"] for r in result["explained"]}
  assert images == counts


def test_answers_compared_by_hand():
  """Ten images: 3 become right, 1 wrong, and 1 wrong in another way."""
  was = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
  now = [1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
  one, other = (
    {
      "index": np.arange(10),
      "is_right": np.array(v, bool),
      "prediction": np.array(v),
    }
    for v in (was, now)
  )
  other["prediction"][9] = 7
  result = explain.compared(one, other)
  assert (result["gained"], result["lost"], result["other"]) == (3, 1, 5)
  assert result["top1"] == 70 and result["change"] == pytest.approx(20)
  # The deviation of 0.2 in ten differences of 1, -1 and 0: 3, 1 and 6 times.
  differences = np.array([1] * 3 + [-1] + [0] * 6)
  expected = 100 * differences.std() / np.sqrt(10)
  assert result["error"] == pytest.approx(expected)


def _config(ops, **model):
  return dataclasses.replace(
    score.Config(),
    model=model_from_dict(model),
    data=score.DataConfig(ops=ops),
    evals=(score.EVALUATORS["classification"](ops=ops),),
  )


def test_what_is_exchanged():
  """One step differs, in every evaluator; nothing is tried twice."""
  path = eval_preprocessing.timm((224, 224), 0.9)
  area = "decode|resize_small(256)|central_crop(224)"
  for ops in (path.ops, "decode|resize(384)", area, "decode|resize(9)|pad(1)"):
    config = _config(ops, name="vit", variant="B/16", gelu="erf")
    every = swaps(config)
    assert len({swap.config for swap in every} | {config}) == len(every) + 1
    for swap in every:
      assert swap.step in STEPS and swap.was != swap.value
      (e,) = swap.config.evals
      assert e.ops == swap.config.data.ops
      is_of_model = swap.step in ("gelu", "ln_eps", "products")
      assert (swap.config.data.ops == ops) == is_of_model
      assert (swap.config.model == config.model) != is_of_model
  texts = {
    (s.step, s.value): s.config.data.ops for s in swaps(_config(path.ops))
  }
  assert texts["dct", "fast"] == path.ops.replace("(dct='accurate')", "")
  assert texts["upsampling", "plain"] == path.ops.replace(
    "'accurate'", "'accurate', upsampling='plain'"
  )
  assert texts["resizer", "tensorflow"] == (
    "decode(dct='accurate')|resize_small(248, 'bicubic', antialias=True)"
    "|central_crop(224)"
  )
  assert texts["antialiasing", "off, by tensorflow"] == (
    "decode(dct='accurate')|resize_small(248, 'bicubic')|central_crop(224)"
  )
  assert texts["crop", "squashed"] == "decode(dct='accurate')|resize_torch(224)"


@pytest.mark.parametrize(
  "model, steps",
  [
    (dict(variant="B/16"), "gelu ln_eps ln_eps products"),
    (dict(variant="R50+B/16"), "gelu ln_eps ln_eps resnet_eps products"),
    (dict(name="bit", variant="R50x1"), "resnet_eps products"),
  ],
)
def test_numerics_of_the_families(model, steps):
  every = swaps(_config("decode|resize(32)|pad(0)", **model))
  assert [swap.step for swap in every] == steps.split()


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
  def chosen(size, **model):
    config = model_from_dict(model)
    return score.choose_protocol(_weights("google"), config, size, "auto", ())

  assert chosen((224, 224), pool="gap")[0] == "big_vision"
  assert chosen((224, 224), name="bit", variant="R50x1")[0] == "google"
  timm = score.choose_protocol(
    _weights("timm"), model_from_dict({}), (384, 384), "auto", ()
  )
  assert timm[1] == eval_preprocessing.timm((384, 384), 1.0).ops
  with pytest.raises(ValueError, match="got --protocol=own, but the file"):
    score.choose_protocol(
      _weights("google"), model_from_dict({}), (224, 224), "own", ()
    )
  deit = published_scores.find(
    "deit_tiny_patch16_224.fb_in1k.safetensors", (224, 224), 1000
  )
  with pytest.raises(ValueError, match="ImageNet's mean and deviation; exp"):
    score.choose_protocol(
      _weights("timm"), model_from_dict({}), (224, 224), "auto", deit
    )


# What is missing, and tables.


def test_all_that_is_missing_is_named_at_once(file, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "jit", None)
  folder = f"--data_dir={tmp_path}"
  on = "--on=imagenet2012,real,a_clean"
  messages = errors(file, f"{tmp_path}/none.npz", on, folder)
  starts = [
    "--on=imagenet2012: got data set 'imagenet2012', which is not prepared",
    "--on=real: got data set 'imagenet2012_real', which is not prepared",
    "--on=a_clean: got data set 'imagenet2012', which is not prepared",
    f"got '{tmp_path}/none.npz', which does not exist",
  ]
  for error, start in zip(messages, starts, strict=True):
    assert error.startswith(start)
  assert errors(file, "--on=available", folder) == (
    "--on=available: none of imagenet2012, real, v2, a, r, sketch, a_clean,"
    " r_clean is on disk.",
  )


def test_flags_that_are_refused(file, capsys):
  (error,) = errors(file, "--on=imagnet")
  assert error.startswith(
    "--on: got 'imagnet', expected imagenet2012, real, v2"
  )
  (error,) = errors(file, "--steps=filter,glu")
  assert error.startswith("--steps: got 'glu', expected dct, upsampling, resiz")
  assert error.endswith("Did you mean 'gelu'?")
  with pytest.raises(SystemExit):
    run(file, "--batch_size=0")
  error = capsys.readouterr().err
  assert "--batch_size: got '0', expected a number from 1." in error


def test_weights_without_a_head(tiny_vit, tmp_path):
  path = str(tmp_path / "x.npz")
  convert.convert(convert.without_head(tiny_vit, "npz"), path, "npz")
  (error,) = errors(path, "--on=digits[test]", f"--workdir={tmp_path}/out")
  assert error.startswith(f"{path}: got weights without a head, expected a")
  assert not (tmp_path / "out").exists()


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


def _row(**changes):
  row = {
    **dict(file="x", on="v2", images=10_000, top1=71.07, top5=90.0),
    **dict(published_top1=71.0, published_top5=None, difference=0.07),
    **dict(source="here", same_pixels=True),
  }
  return row | changes


def test_the_table():
  text = score.scores_table(
    [
      _row(),
      _row(on="a", published_top5=95.5, difference=-1.5, same_pixels=False),
      _row(published_top1=None, difference=None, source=None),
    ]
  )
  assert text.splitlines() == [
    "file  on  images  top-1  top-5  published         difference  source",
    "x     v2  10,000  71.07  90.00      71.00              +0.07  here",
    "x     a   10,000  71.07  90.00      71.00  95.50       -1.50  here (other"
    " preprocessing)",
    "x     v2  10,000  71.07  90.00                                no published"
    " score known by this name",
  ]


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

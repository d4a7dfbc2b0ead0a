"""A checkpoint is scored on other data: classes by name, few-shot, files."""

import json
import pathlib
import shutil

import jax
import pytest
from etils import epath
from shared_runs import COLOURS, FEW, OPS, config, folder

from vit_jax import evaluate, run_checks, train
from vit_jax.callbacks import run_record
from vit_jax.checkpointing import checkpointer, layout
from vit_jax.commands import evaluate as command
from vit_jax.config import ConfigError, freeze, recipe
from vit_jax.data.sources import Sources
from vit_jax.finetune import probes

EVERY = {name: name for name in COLOURS}


def _eval(dataset=None, **options):
  score = {"kind": "classification", "dataset": dataset, "split": "train+val"}
  return {"val": {**score, "ops": OPS, **options}}


def _main(*args):
  command.main(args)


@pytest.mark.slow
def test_classes_in_another_order_are_scored_by_name(run, tmp_path, capsys):
  """Two of four classes: labels 0 and 1 are columns 2 and 3, or 0 and 1."""
  # An evaluation needs no length and no optimizer.
  same = evaluate.evaluate(
    run.config(evals=_eval(split="train"), total_steps=None, optim__lr=-1.0),
    str(run.workdir),
  )
  assert same["val/top1"] == 1 and same["val/count"] == 64
  assert "4 classes, matched by name; the same order" in capsys.readouterr().out
  few = folder(tmp_path / "few", {"red": "red", "white": "white"})
  c = run.config(evals=_eval(few))
  scores = evaluate.evaluate(c, str(run.workdir))
  assert scores["val/top1"] == 1 and scores["val/count"] == 32
  assert "2 of the head's 4 classes, matched by name" in capsys.readouterr().out
  # Where the names are not known, labels are columns, which are others here.
  nameless = run.copy(tmp_path / "run")
  step = nameless / "checkpoints" / "20"
  file = step / "metadata" / "metadata"
  metadata = json.loads(file.read_text())
  assert metadata.pop("class_names") == sorted(COLOURS)
  file.write_text(json.dumps(metadata))
  digests = checkpointer.digests(str(step))
  layout.write_digests(epath.Path(step), digests, metadata)
  assert evaluate.evaluate(c, str(nameless))["val/top1"] == 0
  out = capsys.readouterr().out
  assert "matched by position alone" in out and "images of" not in out


@pytest.mark.slow
def test_what_differs_from_training_is_said(run, capsys):
  """Images that were added since, and another size."""
  root = pathlib.Path(run.dataset.removeprefix("folder:"))
  new = root / "train" / "red" / "new.png"

  def said(**changes):
    capsys.readouterr()
    evaluate.evaluate(run.config(**changes), str(run.workdir))
    return capsys.readouterr().out

  evals = _eval(split="val")
  assert "it was trained on" not in said(evals=evals)
  shutil.copy(root / "train" / "blue" / "0.png", new)
  try:
    assert "val may have images that it was trained on" in said(evals=evals)
  finally:
    new.unlink()
  ops = "decode|resize(32)"
  text = said(data__ops=ops, evals=_eval(ops=ops))
  assert "16 x 16" in text and "32 x 32" in text


@pytest.mark.slow
def test_what_does_not_fit_a_run_is_refused_before_anything_is_compiled(
  run, tmp_path, monkeypatch
):
  """Another model, and other classes: to score, to train, to resume."""
  monkeypatch.setattr(jax, "jit", None)
  other = run.config(evals=_eval(), model__mlp_dim=8)
  with pytest.raises(ConfigError, match=f"init={run.workdir}"):
    evaluate.evaluate(other, str(run.workdir))
  classes = folder(tmp_path / "other", {"red": "red", "rot": "red"})
  c = run.config(evals=_eval(classes))
  with pytest.raises(ConfigError, match="config.evals.val.dataset.* rot;"):
    evaluate.evaluate(c, str(run.workdir))
  with pytest.raises(ConfigError, match="config.evals.val.dataset.* rot;"):
    train.train_and_evaluate(c, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
  five = folder(tmp_path / "five", {**EVERY, "rot": "red"})
  with pytest.raises(ConfigError, match="'rot', 'white'.*expected .'blue',"):
    c = config(five, total_steps=21, evals=_eval(split="val"))
    train.train_and_evaluate(c, str(run.workdir))


@pytest.mark.slow
def test_beside_a_running_run_nothing_is_written_unasked(
  run, tmp_path, monkeypatch, capsys
):
  copy = run.copy(tmp_path / "run")
  argv = [f"--checkpoint={copy}"]
  record = run_record.new()
  (copy / run_record.FILE).write_text(json.dumps(record))
  before = {p for p in copy.rglob("*") if "cache" not in str(p)}
  monkeypatch.setitem(run_record.open_records, record["id"], lambda how: None)
  _main(*argv)
  assert {p for p in copy.rglob("*") if "cache" not in str(p)} == before
  assert f"not written: a run is training in {copy}" in capsys.readouterr().out


@pytest.mark.slow
def test_fewshot_of_a_checkpoint_on_a_folder(run, tmp_path, capfd):
  """It needs no config; shots are as many as every class has, and all."""
  own = folder(tmp_path / "own", {"x": "red", "y": "green"}, 7)
  (tmp_path / "own" / "y" / "0.png").unlink()  # 6 training images of x, 5 of y
  here = f"--workdir={tmp_path}/here"
  _main(f"--checkpoint={run.workdir}", f"--fewshot={own}", here, "--json")
  out, err = capfd.readouterr()
  row = json.loads(out)  # one line, and nothing else
  shots = ("1shot", "5shot", "all")
  assert row["scores"].keys() == {f"fewshot/{name}" for name in shots}
  assert row["scores"]["fewshot/all"] == 1
  assert row["step"] == 20 and row["checkpoint"] == str(run.workdir)
  text = row["data"]["fewshot"]
  assert text.startswith(own) and "(11 images, 2 classes)" in text
  assert f"fewshot     {text}\nstep 20: fewshot  1shot " in err
  (line,) = (tmp_path / "here" / "evaluation.jsonl").read_text().splitlines()
  assert json.loads(line) == row


@pytest.mark.slow
def test_weights_without_a_head_have_features(run, tmp_path):
  """The head is not used: features are scored the same without it."""
  c = run.config(evals=_eval(split="val"))
  features = probes.with_probes(c, {"fewshot": run.dataset}, Sources())
  want = evaluate.evaluate(features, str(run.workdir))
  params, metadata = checkpointer.load_params(str(run.workdir))
  del params["head"]
  checkpointer.write_params(str(tmp_path / "x"), params, metadata)
  assert evaluate.evaluate(features, str(tmp_path / "x")) == want
  with pytest.raises(ConfigError, match="has no head; expected one, or --few"):
    evaluate.evaluate(c, str(tmp_path / "x"))


def test_the_normalisation_in_a_config_is_that_of_its_init(monkeypatch):
  asked = []

  def read(path, mean):
    asked.append(mean)
    raise ValueError

  monkeypatch.setattr(evaluate.weights, "read", read)
  c = config("folder:x", init="a.npz", init_mean="imagenet")
  for path, mean in (("a.npz", None), ("a.npz", "half"), ("b.npz", None)):
    with pytest.raises(ConfigError, match="--checkpoint: "):
      evaluate.open_checkpoint(c, path, mean=mean)
  assert asked == ["imagenet", "half", None]


# Data sets that are not on disk: refused or left out.


def _refused(c):
  with pytest.raises(ConfigError) as e:
    run_checks.setup(c)
  return e.value.errors


def test_a_recipe_without_data_has_an_error_for_each_way_out(tmp_path):
  """Seven few-shot sets and ImageNet are absent."""
  c = recipe("vit_l16")
  c.data.data_dir = str(tmp_path)
  data, fewshot = _refused(freeze(c))
  assert data.startswith("config.data.dataset: got data set 'imagenet2012',")
  assert "--fake_data" in data
  assert f"prepare imagenet2012 --data_dir={tmp_path} --manual_dir=" in data
  assert fewshot.startswith("config.fewshot: got 'required'")
  assert "caltech101" in fewshot and "imagenet2012" not in fewshot
  assert f"do vit-jax prepare $d --data_dir={tmp_path}; done" in fewshot


def test_only_few_shot_sets_that_are_not_on_disk_are_left_out():
  """A misspelt name is an error whatever the option says."""
  few = {**FEW, "split": "test[:100]", "train_split": "train[:160]"}
  pets = {**few, "dataset": "oxford_iiit_pet", "split": "test"}
  for key in ("dataset", "split"):
    evals = {"a": {**few, key: "tets"}, "pets": pets}
    errors = _refused(config("digits", evals=evals))
    assert [e.split(":")[0] for e in errors] == [f"config.evals.a.{key}"]
  evals = _eval("oxford_iiit_pet", split="test")
  (error,) = _refused(config("digits", evals=evals))
  assert "not prepared" in error

"""Few-shot accuracy on several data sets: their mean, and those not there."""

import json

import numpy as np
import pytest
import tiny

from vit_jax import config, evaluate, run_checks, train
from vit_jax.config import ConfigError, defaults, fewshot_evals, freeze, to_dict
from vit_jax.writers.metric_writer import read_metrics

OPS = "decode|resize(16)"
FEW = {
  "kind": "fewshot",
  "ops": OPS,
  "train_split": "train[:160]",
  "shots": (1, 5),
  "every_steps": 4,
  "group": "few",
}
EVALS = {
  "a": {**FEW, "split": "test[:100]"},
  "b": {**FEW, "split": "test[100:200]"},
  "pets": {**FEW, "dataset": "oxford_iiit_pet", "split": "test"},
}


def _config(**changes):
  c = defaults()
  c.update(to_dict(tiny.config()))
  c.data.dataset = "digits"
  c.total_steps = 8
  c.checkpoint.every_steps = 4
  c.evals = EVALS
  tiny.apply(c, changes)
  return freeze(c)


def test_sets_that_are_not_on_disk_are_refused():
  with pytest.raises(ConfigError) as e:
    run_checks.setup(_config())
  (advice,) = e.value.errors
  assert advice == (
    "config.fewshot: got 'required', but not on disk: oxford_iiit_pet. Leave"
    " out their scores: --config.fewshot=available; or prepare them: for d in"
    " oxford_iiit_pet; do vit-jax prepare $d; done"
  )


def test_a_recipe_without_data_has_an_error_for_each_way_out(tmp_path):
  """Seven few-shot sets and ImageNet are absent."""
  c = config.recipe("vit_l16")
  c.data.data_dir = str(tmp_path)
  with pytest.raises(ConfigError) as e:
    run_checks.setup(freeze(c))
  data, fewshot = e.value.errors
  assert data.startswith(
    "config.data.dataset: got data set 'imagenet2012', which is not prepared."
    " --fake_data tries the program without data; to prepare it once: vit-jax"
    f" prepare imagenet2012 --data_dir={tmp_path} --manual_dir=FOLDER (in which"
  )
  assert fewshot.startswith(
    "config.fewshot: got 'required', but not on disk: caltech101, "
  )
  assert "imagenet2012" not in fewshot
  assert f"do vit-jax prepare $d --data_dir={tmp_path}; done" in fewshot


@pytest.mark.parametrize("key", ["dataset", "split"])
def test_only_what_is_not_on_disk_is_left_out(key):
  """A misspelt name is an error whatever the option says."""
  evals = {**EVALS, "a": {**EVALS["a"], key: "tets"}}
  with pytest.raises(ConfigError) as e:
    run_checks.setup(_config(evals=evals, fewshot="available"))
  assert [f.split(":")[0] for f in e.value.errors] == [f"config.evals.a.{key}"]
  evals = {"val": {"kind": "classification", "ops": OPS, "split": "test"}}
  evals["val"]["dataset"] = "oxford_iiit_pet"
  with pytest.raises(ConfigError, match="not prepared"):
    run_checks.setup(_config(evals=evals, fewshot="available"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("run"))
  train.train_and_evaluate(_config(fewshot="available"), workdir)
  return workdir


def _scores(rows, step):
  return {
    k: v
    for r in rows
    for k, v in r.items()
    if r["step"] == step and "/" in k and not k.startswith("train/")
  }


@pytest.mark.slow
def test_the_mean_is_among_the_metrics(run, capfd):
  rows = read_metrics(run)
  for step in (4, 8):
    scores = _scores(rows, step)
    assert scores["few/sets"] == 2 and "pets/5shot" not in scores
    for metric in ("1shot", "5shot"):
      parts = [scores[f"{name}/{metric}"] for name in "ab"]
      assert scores[f"few/{metric}"] == pytest.approx(np.mean(parts))
  with open(f"{run}/metadata.json") as f:
    assert json.load(f)["averages"] == {"few": ["digits", "digits"]}
  # A checkpoint's scores are those of the run, and the sets are named.
  assert evaluate.evaluate(_config(fewshot="available"), run) == scores
  printed = capfd.readouterr().out
  assert "few         mean of 2 data sets: digits, digits\n" in printed
  assert (
    "left out    oxford_iiit_pet: not on disk (config.fewshot=av" in printed
  )


@pytest.mark.slow
def test_a_run_that_resumes_with_other_sets_says_so(run, capfd):
  less = {k: v for k, v in EVALS.items() if k != "b"}
  config = _config(fewshot="available", evals=less, total_steps=9)
  train.train_and_evaluate(config, run, allow_change=("total_steps",))
  printed = capfd.readouterr().err
  assert "few         mean of 1 data set: digits\n" in printed
  assert (
    "changed     the mean 'few' was of digits, digits; earlier and" in printed
  )
  assert _scores(read_metrics(run), 9)["few/sets"] == 1


@pytest.mark.slow
def test_fake_sets_are_all_there_and_read_in_part():
  """Of ImageNet's 65,000 and 50,000 images, two batches of 16 each."""
  c = defaults()
  c.update(to_dict(_config(fake_data=True, evals={})))
  c.evals = {
    **(c.evals or {}),
    **fewshot_evals(
      ops="decode|resize(256)|central_crop(224)", every_steps=10_000
    ),
  }
  for e in c.evals.values():
    e["ops"] = OPS
  prepared = run_checks.setup(freeze(c))
  assert not prepared.skipped_evals and len(prepared.evals) == 7
  parts = tiny.Parts(freeze(c))
  evaluators = prepared.evaluators(parts.trainer, parts.mesh)
  assert len({id(e._features) for e in evaluators}) == 1  # compiled once
  gathered = evaluators[-1].gather(parts.state().params)
  assert [len(rows["label"]) for rows in gathered[""]] == [32, 32]
  scores = evaluators[-1].score(gathered)
  assert scores.keys() == {
    f"fewshot_imagenet2012/{k}shot" for k in (1, 5, 10, 25)
  }

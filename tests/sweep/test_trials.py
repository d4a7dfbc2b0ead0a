"""Short trials before a run: what they try, how they choose, resuming."""

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import weights
from vit_jax.checkpointing import resume_rules
from vit_jax.config import (
  ConfigError,
  LoRAConfig,
  cli,
  defaults,
  freeze,
  model_config,
  to_dict,
)
from vit_jax.data import sources
from vit_jax.finetune import trials
from vit_jax.finetune.trial_candidates import check_budget, rounds

SCORE = {"kind": "classification", "ops": "decode|resize(16)"}


def rates(config):
  """The first changes nothing; the last diverges."""
  return {
    "none": {"optim.lr": 1e-30},
    "good": {"optim.lr": 0.02},
    "wild": {"optim.lr": 1e30, "optim.clip_norm": None},
  }


def worse(config):
  """A change of what the round before chose: a rate too low for any effect."""
  return {"slow": {"optim.lr": config.optim.lr * 1e-28}}


def both(config):
  return [rates, worse]


BUDGET = "80"  # 20 steps of each


@pytest.fixture(scope="module")
def config():
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=30, log_steps=1)))
  c.model.depth, c.optim.name, c.optim.momentum = 1, "sgd", 0.9
  c.data.dataset, c.data.split = "digits", "train[:300]"
  c.data.ops, c.data.batch_size = "decode|resize(16)", 48
  c.init_head = "linear_probe"
  c.evals = {
    "test": {**SCORE, "split": "test"},
    "val": {**SCORE, "split": "train[300:500]", "every_steps": 2},
  }
  return freeze(c)


class Runs:
  """Stands for `one_run.run`.

  Args:
    losses: Folder of a trial -> its loss; None: it diverges.
    ends_at: Folder of the trial in which the process is killed.
  """

  def __init__(self, losses=(), ends_at=None):
    self.losses, self.ends_at = dict(losses), ends_at
    self.configs = {}  # of the trials that ended

  def __call__(self, config, folder, keeps_weights):
    if folder.name == self.ends_at:
      raise KeyboardInterrupt
    self.configs[folder.name] = config
    loss = self.losses.get(folder.name, 0.5)
    scores = {"val/top1": 1.0, "val/loss": loss}
    return {"scores": {} if loss is None else scores}


def choose(config, folder, run=None, budget=BUDGET, rounds_of=both, fixed=()):
  run = run or Runs(ends_at="probe")
  return trials.choose(config, rounds_of, budget, str(folder), fixed, run)


def record(folder):
  return json.loads((folder / "trials.json").read_text())


# Trained.


@pytest.mark.nightly
def test_a_trial_begins_with_the_probe_and_is_not_scored_on_the_test(
  config, tmp_path
):
  """At a rate of 1e-30 it ends with the score with which it began."""
  same = lambda config: {"none": {"optim.lr": 1e-30}}
  trials.choose(config, lambda _: [same], "20", str(tmp_path))
  result = record(tmp_path)
  assert result["chosen"] == "none" and result["steps"] == 20
  probe = json.loads((tmp_path / "trials/probe/linear_probe.json").read_text())
  (trial,) = result["trials"]
  assert trial["top1"] == probe["top1"] > 0.3
  rows = [
    json.loads(line)
    for file in (tmp_path / "trials").glob("*/metrics.jsonl")
    for line in file.read_text().splitlines()
  ]
  assert any("val/top1" in row for row in rows)
  assert not any("test/top1" in row for row in rows)


# How they choose, with a stand-in for training.


def test_a_change_stays_where_it_scores_better(config, tmp_path, capsys):
  """The next round begins with it; what diverges is not chosen."""
  stand_in = Runs({"0_good": 0.3, "0_wild": None, "1_slow": 0.4})

  def run(config, folder, keeps_weights):
    if folder.name == trials.PROBE:
      (folder / trials.LINEAR_PROBE).write_text('{"top1": 0.75}')
    return stand_in(config, folder, keeps_weights)

  chosen = choose(config, tmp_path, run)
  assert chosen.optim.lr == 0.02
  assert stand_in.configs["1_slow"].optim.lr == pytest.approx(0.02e-28)
  assert stand_in.configs["0_none"].total_steps == 20
  result = record(tmp_path)
  assert (result["chosen"], result["steps"]) == ("good", 20)
  assert {t["changes"]: t["loss"] for t in result["trials"]} == {
    **{"none": 0.5, "good": 0.3, "wild": None, "good, slow": 0.4}
  }
  before, _, _ = capsys.readouterr().out.partition("trial 1/")
  assert "data        digits [train[:300]]: 300 images, 10 classes" in before
  assert "probe       75.00% of the held-out images" in before


def test_the_steps_of_a_time_are_measured_once(config, tmp_path, capsys):
  """In 3 s there are 16 steps of 48 images at 270 images/s."""
  timed = []

  def run(config, folder, keeps_weights):
    if folder.name == trials.TIMED:
      timed.append(config.total_steps)
      row = {"step": 20, "time": 0.0, "train/images_per_second": 270.0}
      (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return {"scores": {}}

  one = lambda config: {"one": {"optim.lr": 0.1}}
  for _ in range(2):
    assert choose(config, tmp_path, run, "3s", lambda _: [one]) == config
  assert timed == [20]
  text = "1 trials need at least 20 steps; budget=3s allows 16 at"
  assert capsys.readouterr().out.count(text) == 2


def test_the_normalisation_of_init_is_stated_for_the_probe_alone(
  config, tmp_path, monkeypatch
):
  """The weights of the probe, with which the trials begin, have it already."""
  monkeypatch.setattr(trials.run_checks, "setup", lambda config: None)
  run = Runs()
  c = dataclasses.replace(config, init="a.npz", init_mean="imagenet")
  choose(c, tmp_path, run)
  read = {name: (c.init, c.init_mean) for name, c in run.configs.items()}
  assert read.pop("probe") == ("a.npz", "imagenet")
  assert {*read.values()} == {(str(tmp_path / "trials/probe/probe"), None)}


@pytest.mark.slow
def test_where_there_are_no_trials(config, tmp_path, capsys):
  """Every option is set; the run is too short; the budget is; an error."""
  short = dataclasses.replace(config, total_steps=2)
  for c, budget, fixed, words in (
    (config, BUDGET, {"optim.lr"}, "sets every option"),
    (short, BUDGET, (), "the run itself has 2 steps"),
    (config, "50", {"optim.clip_norm"}, "3 trials need at least 60 steps"),
  ):
    assert choose(c, tmp_path, None, budget, both, fixed) == c
    assert words in capsys.readouterr().out
  for options, message in (
    ({"optim.rate": 1}, "optim.rate"),
    ({"optim.freeze": ("nothing",)}, "no parameter matches"),
  ):
    wrong = lambda _, o=options: [rates, lambda config: {"a": o}]
    with pytest.raises(ConfigError, match=message):
      choose(config, tmp_path, rounds_of=wrong)
  assert not (tmp_path / "trials.json").exists()  # a larger one may follow


# Interrupted ones.


def add_image(folder, number, split="train"):
  for label in "ab":
    path = folder / split / label / f"{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16)).save(path)


def pair(config):
  return [lambda config: {"none": {}, "good": {"optim.lr": 0.02}}]


@pytest.mark.slow
def test_begun_trials_go_on_with_the_same_command_alone(config, tmp_path):
  images, workdir = tmp_path / "images", tmp_path / "run"
  for number in range(20):
    add_image(images, number)
    add_image(images, number, "val")
  data = dataclasses.replace(
    config.data, dataset=f"folder:{images}", split="train"
  )
  (val,) = (e for e in config.evals if e.name == "val")
  evals = lambda **changes: (dataclasses.replace(val, **changes),)
  config = dataclasses.replace(config, data=data, evals=evals(split="val"))
  with pytest.raises(KeyboardInterrupt):
    choose(config, workdir, Runs(ends_at="0_good"), "40", pair)

  def refusal(config, budget="40", rounds_of=pair):
    """Returns the error of going on; nothing runs before it."""
    before = record(workdir)
    with pytest.raises(ConfigError) as caught:
      choose(config, workdir, None, budget, rounds_of)
    assert record(workdir) == before
    return str(caught.value)

  other = dataclasses.replace(config, seed=3)
  assert "config.seed was 0, is now 3" in refusal(other)
  other = dataclasses.replace(config, evals=evals(split="train"))
  assert "config.evals.val.split was 'val'" in refusal(other)
  assert "budget was 40, is now 9999" in refusal(config, budget="9999")
  text = refusal(config, rounds_of=lambda _: [rates])
  assert "were none, good, are now none, good, wild" in text
  assert f"continue the trials in {workdir / 'trials'}" in text
  harmless = dataclasses.replace(
    config, log_steps=7, evals=evals(split="val", every_steps=7)
  )
  choose(harmless, workdir, Runs({"0_good": 0.3}), "40", pair)
  assert record(workdir)["chosen"] == "good"
  # After the last trial, too, until the run has a checkpoint.
  other = dataclasses.replace(config, total_steps=40)
  assert "config.total_steps was 30, is now 40" in refusal(other)
  for split in ("train", "val"):
    add_image(images, 20, split)
  text = refusal(config)
  for option in ("config.evals.val.split", "config.data.dataset"):
    assert f"{option}: the records were 40 of 2 classes" in text


def test_no_budget_after_trials_have_chosen(config, tmp_path, monkeypatch):
  write = lambda file, values: (tmp_path / file).write_text(json.dumps(values))
  (tmp_path / "trials").mkdir()
  write("trials/begun.json", {"budget": "200"})
  write("trials.json", {"steps": 20, "chosen": "pad and crop, mirrored"})
  began = to_dict(dataclasses.replace(config, seed=3))
  changes = resume_rules.differences(began, config)
  resumed = types.SimpleNamespace(changes=changes)
  monkeypatch.setattr(trials.experiment.Experiment, "resumed", resumed)
  with pytest.raises(ConfigError, match="--config: got budget=0.* budget=200"):
    trials.check_without(config, str(tmp_path), ())
  trials.check_without(config, str(tmp_path), ["seed"])
  write("trials.json", {"steps": 20, "chosen": "no change"})
  trials.check_without(config, str(tmp_path), ())


# What they try.


def test_data_and_weights_are_those_of_the_command(config, monkeypatch):
  """Not those of the recipe's argument."""
  opened = []
  digits = sources.open_source("digits", "train", fake=True)

  def open_source(*args, **options):
    opened.append((*args, options))
    return digits

  monkeypatch.setattr(trials.sources, "open_source", open_source)
  source = "finetune:init=lost.npz,model=B/16,budget=10m"
  rounds_of, _ = cli.ask(source, "get_trials")
  init = str(pathlib.Path(__file__).parents[1] / "data/vit_token.weights.npz")
  data = dataclasses.replace(config.data, data_dir="elsewhere")
  config = dataclasses.replace(config, init=init, data=data)
  parts = rounds_of(config)[3](config)
  assert opened == [("digits", "train[:300]", "elsewhere", {"fake": False})]
  assert {*parts["the head alone"]["optim.freeze"]} == {
    name for name in weights.read(init).params if not name.startswith("head/")
  }


def test_what_is_tried(config):
  block = "Transformer/encoderblock_{}/LayerNorm_0/scale".format
  heads = ["head/kernel", "head_dist/kernel", "pre_logits/kernel"]
  heads += ["masked_patch/mask_token"]
  body = ["Transformer/encoder_norm/bias", "pooled_norm/scale"]
  body += [block(i) for i in range(12)]
  params = dict.fromkeys([*body, *heads], np.zeros(8))
  params["embedding/kernel"] = np.zeros((8, 8, 3, 4))

  def tried(config, side=300, **options):
    every = rounds(side, 300, params, model_config(), **options)
    return [of_round(config) for of_round in every]

  of_small, of_large = tried(config, 28), tried(config)
  # Small images get no strong crop.
  assert {*of_large[0]} - {*of_small[0]} == {"crop of 5 to 100 %"}
  assert of_small[1:] == of_large[1:]
  _, mirrored, rates, parts, larger = of_small
  assert mirrored["mirrored"] == {"data.ops": "decode|resize(16)|flip_lr"}
  lower, higher = (o["optim.lr"] / config.optim.lr for o in rates.values())
  assert lower == pytest.approx(1 / 3, rel=0.05)
  assert higher == pytest.approx(3, rel=0.05)
  frozen = parts["the last half of the blocks"]["optim.freeze"]
  assert {*frozen} == {"embedding/kernel", *map(block, range(6))}
  alone = parts["the head alone"]["optim.freeze"]
  assert {*alone} == {*body, "embedding/kernel"}
  assert not tried(dataclasses.replace(config, lora=LoRAConfig(rank=2)))[3]
  # 2 x 2 patches become 3 x 3, as scored as trained on, and the run has
  # 20 instead of 30 steps, or two thirds of its epochs.
  ops = ("data.ops", "evals.test.ops", "evals.val.ops")
  shorter = {"total_steps": 20, "optim.warmup_steps": 0}
  assert larger == {
    "24 x 24 pixels": {**dict.fromkeys(ops, "decode|resize(24)"), **shorter}
  }
  epochs = dataclasses.replace(config, total_steps=None, total_epochs=6.0)
  (changes,) = tried(epochs)[4].values()
  assert changes["total_epochs"] == 4.0 and "total_steps" not in changes
  assert tried(config, has_size=True)[4] == {}


def test_budgets():
  for text in ("10", "0", "10m", "1.5m", "90s"):
    check_budget(text)
  for text in ("10 minutes", "m", "-1", "1.5", "1h", ""):
    with pytest.raises(ValueError, match="budget: got "):
      check_budget(text)

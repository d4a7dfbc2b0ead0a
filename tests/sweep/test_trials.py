"""Short trials before a run: what they try, how they choose, resuming."""

import json

import pytest
import tiny

from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.config.trial_candidates import candidates, check_budget
from vit_jax.sweep import trials

SCORE = {"kind": "classification", "ops": "decode|resize(16)"}
# Training at the first rate changes nothing, and at the second diverges.
CANDIDATES = {
  "none": {"optim.lr": 1e-30},
  "good": {"optim.lr": 0.01},
  "wild": {"optim.lr": 1e30, "optim.clip_norm": None},
}
# Of a rung of three trials, and one of two that are three times as long.
BUDGET = str(20 * (3 + 2 * 3))


@pytest.fixture(scope="module")
def config():
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=6, log_steps=1)))
  c.model.depth, c.optim.name, c.optim.momentum = 1, "sgd", 0.9
  c.data.dataset, c.data.split = "digits", "train[:300]"
  c.data.ops, c.data.batch_size = "decode|resize(16)", 48
  c.init_head = "linear_probe"
  c.evals = {
    "test": {**SCORE, "split": "test"},
    "val": {**SCORE, "split": "train[300:500]", "every_steps": 2},
  }
  return freeze(c)


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
  """The trials of a run."""
  folder = tmp_path_factory.mktemp("trials")
  chosen = trials.choose(config, CANDIDATES, BUDGET, str(folder))
  assert chosen.optim.lr == 0.01
  return folder


def record(folder):
  return json.loads((folder / "trials.json").read_text())


@pytest.mark.slow
def test_the_best_go_on_with_more_steps(workdir):
  result = record(workdir)
  assert result["chosen"] == "good" and result["steps"] == 20
  top1 = {(t["candidate"], t["steps"]): t["top1"] for t in result["trials"]}
  assert {name for name, steps in top1 if steps == 60} == {"none", "good"}
  assert len(top1) == 5 and top1["wild", 20] is None
  # A trial starts from the linear probe.
  probe = json.loads((workdir / "trials/probe/linear_probe.json").read_text())
  assert top1["none", 20] == top1["none", 60] == probe["top1"]
  assert top1["good", 60] > probe["top1"]


@pytest.mark.slow
def test_nothing_is_chosen_on_the_test(workdir):
  rows = [
    json.loads(line)
    for file in (workdir / "trials").glob("*/metrics.jsonl")
    for line in file.read_text().splitlines()
  ]
  assert any("val/top1" in row for row in rows)
  assert not any("test/top1" in row for row in rows)


@pytest.mark.slow
def test_an_interrupted_search_goes_on(config, workdir, monkeypatch):
  whole = record(workdir)
  file = workdir / "trials.json"
  file.write_text(json.dumps({**whole, "trials": [], "chosen": None}))
  monkeypatch.setattr(
    "vit_jax.train.train_and_evaluate", lambda *args, **options: 1 / 0
  )
  trials.choose(config, CANDIDATES, "9999", str(workdir))
  assert record(workdir) == whole


def test_wrong_options_are_refused_before_the_first_trial(config, tmp_path):
  wrong = {"a": {"optim.rate": 1}, "b": {"data.ops": "decode|resize(16)"}}
  with pytest.raises(ConfigError, match="optim.rate"):
    trials.choose(config, wrong, BUDGET, str(tmp_path))
  assert not (tmp_path / "trials").exists()


def test_options_of_the_user_are_not_tried():
  free = trials.free(CANDIDATES, {"optim.clip_norm": "1.0"})
  assert list(free) == ["none", "good"]


def test_small_images_get_no_strong_crop():
  block = "Transformer/encoderblock_{}/LayerNorm_0/scale".format
  names = ["embedding/kernel", "Transformer/encoder_norm/bias", "head/kernel"]
  names += map(block, range(12))
  of_small, of_large = (
    candidates((32, 32), 0.03, side, names) for side in (28, 300)
  )
  more = {"crop of 5 to 100 %", "crop of 5 to 100 %, mirrored"}
  assert {*of_large} - {*of_small} == more
  blocks = of_small["last half of the blocks alone, no augmentation"]
  frozen = {"embedding/kernel", *map(block, range(6))}
  assert {*blocks["optim.freeze"]} == frozen


@pytest.mark.parametrize("text", ["10", "0", "10m", "1.5m", "90s"])
def test_budgets(text):
  check_budget(text)


@pytest.mark.parametrize("text", ["10 minutes", "m", "-1", "1.5", "1h", ""])
def test_what_is_no_budget(text):
  with pytest.raises(ValueError, match="got budget="):
    check_budget(text)

"""Few-shot data sets that are not on disk: refused or left out.

Their mean is in test_train.py.
"""

import pytest
import tiny

from vit_jax import config, run_checks
from vit_jax.config import ConfigError, freeze

OPS = "decode|resize(16)"
FEW = {
  **{"kind": "fewshot", "ops": OPS},
  **{"train_split": "train[:160]", "shots": (1, 5)},
}
EVALS = {
  "a": {**FEW, "split": "test[:100]"},
  "pets": {**FEW, "dataset": "oxford_iiit_pet", "split": "test"},
}


def _config(evals=EVALS, **changes):
  return tiny.config(data__dataset="digits", evals=evals, **changes)


def _errors(c):
  with pytest.raises(ConfigError) as e:
    run_checks.setup(c)
  return e.value.errors


def test_a_recipe_without_data_has_an_error_for_each_way_out(tmp_path):
  """Seven few-shot sets and ImageNet are absent."""
  c = config.recipe("vit_l16")
  c.data.data_dir = str(tmp_path)
  data, fewshot = _errors(freeze(c))
  assert data.startswith("config.data.dataset: got data set 'imagenet2012',")
  assert "--fake_data" in data
  assert f"prepare imagenet2012 --data_dir={tmp_path} --manual_dir=" in data
  assert fewshot.startswith("config.fewshot: got 'required'")
  assert "caltech101" in fewshot and "imagenet2012" not in fewshot
  assert f"do vit-jax prepare $d --data_dir={tmp_path}; done" in fewshot


@pytest.mark.parametrize("key", ["dataset", "split"])
def test_only_what_is_not_on_disk_is_left_out(key):
  """A misspelt name is an error whatever the option says."""
  evals = {**EVALS, "a": {**EVALS["a"], key: "tets"}}
  errors = _errors(_config(evals, fewshot="available"))
  assert [f.split(":")[0] for f in errors] == [f"config.evals.a.{key}"]
  val = {"kind": "classification", "ops": OPS, "split": "test"}
  evals = {"val": {**val, "dataset": "oxford_iiit_pet"}}
  (error,) = _errors(_config(evals, fewshot="available"))
  assert "not prepared" in error

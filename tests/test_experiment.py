"""All errors of a run at once, before anything is compiled."""

import re

import numpy as np
import pytest
import tiny

from vit_jax import experiment, run_checks, sharding
from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.inputs import Inputs

OPS = "decode|resize(16)"
FEWSHOT, TOP1 = {"kind": "fewshot"}, {"kind": "classification"}


def _config(**changes):
  values = to_dict(tiny.config())
  values["data"]["dataset"] = "digits"
  config = defaults()
  config.update(values)
  tiny.apply(config, changes)
  return freeze(config)


def _errors(config, **kwargs):
  with pytest.raises(ConfigError) as e:
    run_checks.setup(config, **kwargs)
  return e.value.errors


def _eval(**options):
  return {"e": {"dataset": "digits", "ops": OPS} | options}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  """A link of the run's folder whose disk is absent."""
  (tmp_path / "checkpoints").symlink_to(tmp_path / "absent")
  (error,) = _errors(_config(), workdir=str(tmp_path))
  assert error.startswith(f"--workdir: got '{tmp_path}'")


def test_everything_at_once_and_before_a_data_set_is_made(tmp_path):
  """Faults of options, machine and disk, each with its option."""
  splits = {"train_split": "tran", "split": "test[5:2]"}
  config = _config(
    model__variant="Ti/7",
    model__num_heads=5,
    data__dataset="digitss",
    data__batch_size=20,
    data__data_dir=str(tmp_path),
    init=str(tmp_path / "nowhere"),
    evals={
      "e": {**TOP1, "ops": OPS, "dataset": "digits", "split": "tets"},
      "f": {**FEWSHOT, "ops": OPS, "dataset": "digits", **splits},
      "g": {**TOP1, "ops": OPS, "dataset": "cifar01", "split": "test"},
    },
  )
  errors = "\n".join(_errors(config, errors=["config.x: no such option."]))
  for text in (
    "config.x: ",
    "config.model.num_heads: got 5",
    "config.model.variant='Ti/7'",
    "config.data.batch_size: got 20",
    "config.data.dataset: got data set 'digitss'",
    "'digits'?",
    "config.evals.e.split: got",
    "config.evals.f.train_split: got",
    "config.evals.f.split: got",
    "config.evals.g.dataset: got",
    "config.init: got",
  ):
    assert text in errors
  assert not list(tmp_path.iterdir())


WARMUP = dict(total_steps=None, total_epochs=2.0, optim__warmup_steps=1000)
# Changes of a run, and the option and key words of its only error.
WRONG = [
  ({"mesh__data": 3}, "config.mesh: .*'data': 3"),
  (WARMUP, "config.optim.warmup_steps: .* 162 "),  # 2 * 1,297 / 16 steps
  ({"data__dataset": "cifar10"}, "config.data.dataset: .*prepare cifar10"),
  ({"evals": _eval(**FEWSHOT, layer="prelogits")}, "config.evals.e.layer: "),
  ({"evals": _eval(**FEWSHOT, shots=(1, 500))}, "config.evals.e.shots: "),
  ({"evals": _eval(**FEWSHOT, l2=(1.0, 0.0))}, "config.evals.e.l2: "),
  (
    {
      "evals": _eval(**TOP1, dataset="cifar100", split="test"),
      "fake_data": True,
    },
    "config.evals.e.dataset: .*100 classes.* 10,",
  ),
  (
    {"evals": {"train": _eval(**TOP1, split="test")["e"]}},
    "config.evals.train: ",
  ),
  ({"num_classes": 5}, "config.num_classes: got 5.* 10"),
  # It is the evaluator's, too.
  (
    {"data__dataset": "digets", "evals": _eval(**TOP1, dataset=None)},
    "config.data.dataset: .*'digets'",
  ),
]


@pytest.mark.parametrize("changes, words", WRONG)
def test_an_error_names_its_option(changes, words):
  (error,) = _errors(_config(**changes))
  assert re.match(words, error), error


def test_init_of_another_shape_or_damaged(tmp_path):
  path = tmp_path / "weights.npz"
  config = _config(init=str(path))
  np.savez(path, **{"embedding/kernel": np.zeros((8, 8, 3, 64), np.float32)})
  (error,) = _errors(config)
  assert "embedding/kernel: got shape (8, 8, 3, 64)" in error
  assert "(8, 8, 3, 32)" in error and "cls: missing" in error
  path.write_bytes(b"PK\x03\x04 cut off")
  (error,) = _errors(config)
  assert error.startswith(f"config.init: got '{path}'")


def test_fake_data_need_nothing_on_disk():
  config = _config(fake_data=True, data__dataset="imagenet2012")
  errors = run_checks.data_errors(experiment.Experiment(config))
  assert not any(errors.values())


def test_records_without_numbers_count_from_the_images_seen():
  """96 images are 12 batches of 8, in whatever number of steps."""
  config = _config(data__batch_size=8)
  begun = []

  class Data(tiny.Data):
    """Its batches have no numbers of records."""

    def batches(self, start_step, process_index, process_count):
      begun.append(start_step)
      while True:
        batch = tiny.batch(start_step, config)
        yield {k: batch[k] for k in ("image", "label")}

  run = experiment.Experiment(config, data=Data())
  saved = {"accounting": {"position": 96}}
  mesh = sharding.make_mesh(config.mesh)
  trainer = run.trainer(mesh)
  batches, _ = Inputs(run, trainer, mesh).batches(6, saved, trainer.state)
  batch = next(batches)
  np.testing.assert_array_equal(batch["index"], range(96, 104))
  assert begun == [12]

"""All errors of a run at once, before anything is compiled."""

import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import experiment, run_checks, sharding
from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.inputs import Inputs


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  """A link of the run's folder whose disk is absent."""
  (tmp_path / "checkpoints").symlink_to(tmp_path / "absent")
  (error,) = _errors(_config(), workdir=str(tmp_path))
  assert error == (
    f"--workdir: got '{tmp_path}', where no files can be written"
    f" ({tmp_path}/checkpoints: File exists)."
  )


def test_everything_at_once(tmp_path):
  """Faults of options, machine and disk, each with what to do."""
  config = _config(
    model__variant="Ti/7",
    model__num_heads=5,
    data__dataset="digitss",
    data__batch_size=20,
    init=str(tmp_path / "nowhere"),
    evals={
      "val": {
        "kind": "classification",
        "dataset": "digits",
        "split": "tets",
        "ops": "decode|resize(16)",
      }
    },
  )
  errors = "\n".join(_errors(config, errors=["config.x: no such option."]))
  for text in (
    "config.x: no such option.",
    "config.model.num_heads: got 5, expected a divisor of the width 32",
    "the patch of 7 (config.model.variant='Ti/7')",
    "config.data.batch_size: got 20, which does not split over data*fsdp = 8",
    "config.data.dataset: got data set 'digitss'",
    "Did you mean 'digits'?",
    "config.evals.val.split: got",
    "config.init: got",
    "does not exist",
  ):
    assert text in errors


def test_mesh_that_does_not_fit_the_devices():
  (error,) = _errors(_config(mesh__data=3))
  assert error.startswith("config.mesh: got {'data': 3, 'fsdp': 1")


def test_warmup_longer_than_the_epochs():
  config = _config(total_steps=None, total_epochs=2.0, optim__warmup_steps=1000)
  (error,) = _errors(config)
  # 2 * 1,297 / 16 = 162 steps.
  assert "got 1000, expected fewer than the 162 steps of the run" in error


def test_data_set_that_is_not_on_disk():
  (error,) = _errors(_config(data__dataset="cifar10"))
  assert "is not prepared" in error and "vit-jax prepare cifar10" in error


@pytest.mark.parametrize(
  "classes, message", [(0, "with no class folders"), (1, "two or more classes")]
)
def test_folder_without_classes(tmp_path, classes, message):
  for i in range(classes):
    (tmp_path / f"class{i}").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / f"class{i}" / "a.png")
  config = _config(data__dataset=f"folder:{tmp_path}")
  assert any(message in error for error in _errors(config))


def test_init_of_another_shape(tmp_path):
  path = tmp_path / "weights.npz"
  np.savez(path, **{"embedding/kernel": np.zeros((8, 8, 3, 64), np.float32)})
  (error,) = _errors(_config(init=str(path)))
  assert "embedding/kernel: got shape (8, 8, 3, 64)" in error
  assert "expected (8, 8, 3, 32)" in error
  assert "cls: missing" in error


def test_init_that_is_no_run(tmp_path):
  (error,) = _errors(_config(init=str(tmp_path)))
  assert "has no checkpoint in it; expected the folder of a run" in error


def _eval(**options):
  return {"e": {"dataset": "digits", "ops": "decode|resize(16)", **options}}


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"evals": _eval(kind="fewshot", layer="prelogits")},
      "config.evals.e.layer: got 'prelogits', expected a name among",
    ),
    (
      {"evals": _eval(kind="fewshot", shots=(1, 500))},
      "config.evals.e.shots: ",
    ),
    (
      {"evals": _eval(kind="fewshot", l2=(1.0, 0.0))},
      "config.evals.e.l2: got (1.0, 0.0), expected numbers above 0",
    ),
    (
      {
        "evals": _eval(kind="classification", dataset="cifar100", split="test"),
        "fake_data": True,
      },
      "config.evals.e.dataset: got 'cifar100' with 100 classes, expected at"
      " most 10, the width of the head",
    ),
    (
      {
        "evals": {
          "train": {
            "kind": "classification",
            "split": "test",
            "ops": "decode|resize(16)",
          }
        }
      },
      "config.evals.train: got 'train', expected another name",
    ),
    ({"num_classes": 5}, "config.num_classes: got 5, expected the 10"),
  ],
)
def test_errors_that_would_show_only_after_training(changes, message):
  (error,) = _errors(_config(**changes))
  assert message in error


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off"])
def test_init_that_is_damaged(tmp_path, content):
  path = tmp_path / "weights.npz"
  path.write_bytes(content)
  (error,) = _errors(_config(init=str(path)))
  assert error.startswith(f"config.init: got '{path}'")


def test_processes_that_cannot_share_rows(monkeypatch):
  error = lambda mesh: [f"of {dict(mesh.shape)}"]
  monkeypatch.setattr(experiment.sharding, "row_errors", error)
  errors = _errors(_config(mesh__data=1, mesh__tensor=8))
  assert errors == ("of {'data': 1, 'fsdp': 1, 'tensor': 8}",)


def test_errors_are_reported_before_a_data_set_is_made(tmp_path):
  evals = _eval(kind="fewshot", split="test", layer="nothing")
  config = _config(data__data_dir=str(tmp_path), mesh__data=3, evals=evals)
  errors = "\n".join(_errors(config, errors=["config.x: no such option."]))
  for text in ("config.x", "config.mesh", "config.evals.e.layer"):
    assert text in errors
  assert not list(tmp_path.iterdir())


def _data_errors(**changes):
  errors = run_checks.data_errors(experiment.Experiment(_config(**changes)))
  return [error for part in errors.values() for error in part]


def test_without_errors():
  run_checks.setup(_config())
  evals = {
    "test": {"kind": "classification", "split": "test", "dataset": None},
    "few": {"kind": "fewshot", "train_split": "train[:50%]", "split": "test"},
  }
  assert _data_errors(evals=evals) == []
  assert _data_errors(fake_data=True, data__dataset="imagenet2012") == []


def test_errors_of_data_begin_with_the_key_and_come_all_at_once():
  evals = {
    "a": {"kind": "classification", "split": "vali"},
    "b": {"kind": "classification", "dataset": "cifar01", "split": "test"},
    "c": {"kind": "fewshot", "train_split": "tran", "split": "test[5:2]"},
  }
  errors = _data_errors(
    data__split="train[", data__ops="no such thing", evals=evals
  )
  starts = [
    "config.data.split: got split 'train['",
    "config.evals.a.split: got split 'vali', expected one of",
    "config.evals.b.dataset: got data set 'cifar01'",
    "config.evals.c.train_split: got split 'tran'",
    "config.evals.c.split: got split 'test[5:2]'",
  ]
  assert len(errors) == len(starts)
  for text, start in zip(errors, starts, strict=True):
    assert text.startswith(start), text


class _Data(tiny.Data):
  """Data whose batches have no numbers of records, and no name."""

  def batches(self, start_step, process_index, process_count):
    config = _config(data__batch_size=8)
    while True:
      batch = tiny.batch(start_step, config)
      yield {k: batch[k] for k in ("image", "label")}


def test_data_without_a_name_are_named_by_their_class():
  run = experiment.Experiment(_config(num_classes=3), data=_Data())
  (error,) = run_checks.length_and_head_errors(run)
  assert error.endswith("the 10 of '_Data', or None.")


def test_records_without_numbers_count_from_the_images_seen():
  """96 images are 12 batches of 8, in whatever number of steps."""
  config = _config(data__batch_size=8)
  begun = []

  class Begun(_Data):
    def batches(self, start_step, *processes):
      begun.append(start_step)
      return super().batches(start_step, *processes)

  run = experiment.Experiment(config, data=Begun())
  saved = {"accounting": {"position": 96}}
  mesh = sharding.make_mesh(config.mesh)
  trainer = run.trainer(mesh)
  batches, _ = Inputs(run, trainer, mesh).batches(6, saved, trainer.state)
  batch = next(batches)
  np.testing.assert_array_equal(batch["index"], range(96, 104))
  assert begun == [12]


def test_a_shared_data_set_is_one_error():
  evals = _eval(kind="classification", split="test", dataset=None)
  (text,) = _errors(_config(data__dataset="digets", evals=evals))
  assert text.startswith("config.data.dataset: got data set 'digets'")

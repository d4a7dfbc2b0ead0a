"""Training on data of one's own (docs/tasks/extend.md)."""

import importlib.util
import pathlib
import re
import types

import jax
import numpy as np
import pytest
import tiny

from vit_jax import run_checks, train
from vit_jax.batch import DataError
from vit_jax.config import ConfigError

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tasks" / "extend.md"
BLOCKS = re.findall(
  r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
ARRAYS, LOADER = (
  next(b for b in BLOCKS if f"class {name}" in b)
  for name in ("Arrays:", "Loader(")
)


def _config(**changes):
  """Four steps; dropout depends on the index."""
  return tiny.config(
    total_steps=4,
    checkpoint__every_steps=2,
    data__dataset="nowhere",
    model__depth=1,
    model__dropout=0.1,
    **changes,
  )


def _only_classes(code):
  """The page's imports and classes, without the run."""
  space = {"__name__": "readme"}
  exec(code.split("\nrng = ")[0], space)
  return space


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)
  label = rng.integers(10, size=100)
  image = (
    rng.integers(40, size=(100, 16, 16, 3)) + 20 * label[:, None, None, None]
  )
  return _only_classes(ARRAYS)["Arrays"](image.astype(np.uint8), label, 16)


def _stopping(data, before):
  """The same, from a machine that is taken away before a step."""

  def batches(start_step, process_index, process_count):
    stream = data.batches(start_step, process_index, process_count)
    for step, batch in enumerate(stream, start_step):
      if step == before:
        raise KeyboardInterrupt
      yield batch

  return types.SimpleNamespace(**vars(data), batches=batches)


def _cut_and_resumed(data, folder):
  cut = str(folder)
  with pytest.raises(KeyboardInterrupt):
    train.train_and_evaluate(_config(), cut, _stopping(data, before=3))
  return train.train_and_evaluate(_config(), cut, data)


@pytest.fixture(scope="module")
def whole(arrays, tmp_path_factory):
  """The state of a run that was not cut."""
  return train.train_and_evaluate(
    _config(), str(tmp_path_factory.mktemp("whole")), arrays
  )


@pytest.mark.nightly
def test_arrays_train_and_resume_to_the_bit(arrays, whole, tmp_path, capfd):
  resumed = _cut_and_resumed(arrays, tmp_path / "cut")
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  err = capfd.readouterr().err
  assert "data        Arrays, given: 100 images, 10 classes\n" in err
  assert "resumes     step 2" in err
  with pytest.raises(ConfigError, match="config.data.dataset: got data set"):
    # What config.data names.
    train.train_and_evaluate(_config(), str(tmp_path / "cut"))
  wrong = _config(data__ops="decode|resize(24)")
  with pytest.raises(DataError, match=r"got uint8 \(16, 16, 16, 3\), exp"):
    train.train_and_evaluate(wrong, str(tmp_path / "wrong"), arrays)
  assert not list((tmp_path / "wrong" / "checkpoints").iterdir())


@pytest.mark.nightly
@pytest.mark.skipif(
  not importlib.util.find_spec("torch"), reason="PyTorch is not installed"
)
def test_a_torch_loader_feeds_the_same_rows(
  arrays, whole, tmp_path, monkeypatch
):
  import torch

  monkeypatch.chdir(tmp_path)
  space = {"__name__": "__main__"}
  exec(ARRAYS, space)
  exec(LOADER, space)
  assert (tmp_path / "runs/loader/checkpoints/30").is_dir()
  data = space["Loader"](
    torch.utils.data.TensorDataset(
      torch.from_numpy(arrays.images), torch.from_numpy(arrays.labels)
    ),
    10,
    16,
  )
  resumed = _cut_and_resumed(data, tmp_path / "cut")
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_processes_get_parts_of_a_batch(arrays):
  whole = next(arrays.batches(3, 0, 1))
  parts = [next(arrays.batches(3, i, 2)) for i in range(2)]
  for key, value in whole.items():
    np.testing.assert_array_equal(
      np.concatenate([p[key] for p in parts]), value
    )


class _Wrong:
  num_examples, num_classes, class_names = 100, 0, ("a",)

  def batches(self, start_step, process_index, process_count):
    raise NotImplementedError


def test_errors_of_data_come_with_the_rest():
  with pytest.raises(ConfigError) as e:
    run_checks.setup(_config(optim__lr=-1.0), data=_Wrong())
  keys = {error.split(": got")[0] for error in e.value.errors}
  assert {"config.optim.lr", "data.num_classes", "data.class_names"} <= keys
  keys = {e.split(":")[0] for e in run_checks.given_data_errors(object())}
  assert keys >= {"data.num_examples", "data.num_classes", "data.batches"}

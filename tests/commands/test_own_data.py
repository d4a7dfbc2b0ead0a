"""Training on data of one's own, by the classes of docs/tasks/extend.md."""

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


def _class(name, **space):
  """Returns a class of the page; the run behind it is left out."""
  block = next(b for b in BLOCKS if f"class {name}" in b)
  exec(re.split(r"\n(?=rng = |tensors = |tensors, )", block)[0], space)
  return space[name]


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)
  label = rng.integers(10, size=100)
  image = (
    rng.integers(40, size=(100, 16, 16, 3)) + 20 * label[:, None, None, None]
  )
  return _class("Arrays", __name__="page")(image.astype(np.uint8), label, 16)


def _stopping(data, before):
  """The same, from a machine that is taken away before a step."""

  def batches(start_step, process_index, process_count):
    stream = data.batches(start_step, process_index, process_count)
    for step, batch in enumerate(stream, start_step):
      if step == before:
        raise KeyboardInterrupt
      yield batch

  return types.SimpleNamespace(**vars(data), batches=batches)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["arrays", "loader of torch"])
def test_it_trains_and_resumes_to_the_bit(arrays, tmp_path, capfd, kind):
  data = arrays
  if kind != "arrays":
    torch = pytest.importorskip("torch")
    tensors = map(torch.from_numpy, (arrays.images, arrays.labels))
    loader = _class("Loader", __name__="page", Arrays=type(arrays))
    data = loader(torch.utils.data.TensorDataset(*tensors), 10, 16)
  whole = train.train_and_evaluate(_config(), str(tmp_path / "whole"), arrays)
  cut = str(tmp_path / "cut")
  with pytest.raises(KeyboardInterrupt):
    train.train_and_evaluate(_config(), cut, _stopping(data, before=3))
  capfd.readouterr()
  resumed = train.train_and_evaluate(_config(), cut, data)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  err = capfd.readouterr().err
  assert ", given: 100 images, 10 classes\n" in err
  assert "resumes     step 2" in err
  with pytest.raises(ConfigError, match="config.data.dataset: got data set"):
    train.train_and_evaluate(_config(), cut)  # what config.data names


def test_processes_get_parts_of_a_batch(arrays):
  whole = next(arrays.batches(3, 0, 1))
  parts = [next(arrays.batches(3, i, 2)) for i in range(2)]
  for key, value in whole.items():
    np.testing.assert_array_equal(
      np.concatenate([p[key] for p in parts]), value
    )


@pytest.mark.nightly
def test_a_wrong_batch_stops_a_run_before_its_first_step(arrays, tmp_path):
  config = _config(data__ops="decode|resize(24)")
  with pytest.raises(DataError, match=r"got uint8 \(16, 16, 16, 3\), exp"):
    train.train_and_evaluate(config, str(tmp_path), arrays)
  assert not list((tmp_path / "checkpoints").iterdir())


def test_errors_of_data_come_with_the_rest():
  wrong = types.SimpleNamespace(
    num_examples=100, num_classes=0, class_names=("a",), batches=iter
  )
  with pytest.raises(ConfigError) as e:
    run_checks.setup(_config(optim__lr=-1.0), data=wrong)
  keys = {error.split(": got")[0] for error in e.value.errors}
  assert {"config.optim.lr", "data.num_classes", "data.class_names"} <= keys
  keys = {e.split(":")[0] for e in run_checks.given_data_errors(object())}
  assert keys >= {"data.num_examples", "data.num_classes", "data.batches"}

"""Training on data of one's own (docs/tasks/extend.md); all is opened once."""

import collections
import importlib.util
import json
import pathlib
import re
import types

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

import vit_jax
from vit_jax import run_checks, train, weights
from vit_jax.batch import DataError
from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.data import download_and_prepare, folder, sources

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tasks" / "extend.md"
BLOCKS = re.findall(
  r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
ARRAYS, LOADER = (
  next(b for b in BLOCKS if f"class {name}" in b)
  for name in ("Arrays:", "Loader(")
)
OPS = "decode|resize(16)"


def _config(**changes):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=4, checkpoint__every_steps=2)))
  c.data.dataset = "nowhere"
  c.model.depth, c.model.dropout = 1, 0.1  # which depends on the index
  tiny.apply(c, changes)
  return freeze(c)


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


def _assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.nightly
def test_arrays_train_and_resume_to_the_bit(arrays, tmp_path, capfd):
  whole = train.train_and_evaluate(_config(), str(tmp_path / "whole"), arrays)
  cut = str(tmp_path / "cut")
  with pytest.raises(KeyboardInterrupt):
    train.train_and_evaluate(_config(), cut, _stopping(arrays, before=3))
  resumed = train.train_and_evaluate(_config(), cut, arrays)
  _assert_same(whole, resumed)
  err = capfd.readouterr().err
  assert "data        Arrays, given: 100 images, 10 classes\n" in err
  assert "resumes     step 2" in err
  with pytest.raises(ConfigError, match="config.data.dataset: got data set"):
    train.train_and_evaluate(_config(), cut)  # what config.data names


@pytest.mark.nightly
@pytest.mark.skipif(
  not importlib.util.find_spec("torch"), reason="PyTorch is not installed"
)
def test_a_torch_loader_feeds_the_same_rows(arrays, tmp_path, monkeypatch):
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
  whole = train.train_and_evaluate(_config(), str(tmp_path / "whole"), arrays)
  cut = str(tmp_path / "cut")
  with pytest.raises(KeyboardInterrupt):
    train.train_and_evaluate(_config(), cut, _stopping(data, before=3))
  _assert_same(whole, train.train_and_evaluate(_config(), cut, data))


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


@pytest.fixture
def counts(tmp_path, monkeypatch):
  """Opens of "counted:/path" by split, and reads of weights."""
  counts = collections.Counter()
  for i, split in enumerate(("train", "test")):
    for name in "ab":
      (tmp_path / "data" / split / name).mkdir(parents=True)
      for j in range(8):
        image = Image.new("RGB", (16, 16), (10 * i, 10 * j, 200))
        image.save(tmp_path / "data" / split / name / f"{j}.png")

  def open_counted(dataset, split, data_dir):
    counts[split] += 1
    dataset = dataset.replace("counted:", folder.PREFIX)
    return folder.open_folder(dataset, split, data_dir)

  monkeypatch.setitem(sources.OPENERS, "counted:", open_counted)
  for name in ("read", "adapt"):
    monkeypatch.setattr(weights, name, _counted(counts, getattr(weights, name)))
  return counts


def _counted(counts, fn):
  def counted(*args, **kwargs):
    counts[fn.__name__] += 1
    return fn(*args, **kwargs)

  return counted


@pytest.mark.nightly
def test_several_classes_an_image_from_a_csv_to_predict(tmp_path):
  """Pictures that are red, green, both or neither, on a transparent ground."""
  lines, classes = ["file,label"], ("green", "red")
  for i in range(48):
    is_there = [i % 2, i // 2 % 2]
    pixels = np.zeros([16, 16, 4], np.uint8)
    pixels[:8, :, 1], pixels[8:, :, 0] = 255, 255
    pixels[:8, :, 3], pixels[8:, :, 3] = np.multiply(255, is_there)
    Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    names = [
      name for name, there in zip(classes, is_there, strict=True) if there
    ]
    lines.append(f"{i}.png,{'|'.join(names)}")
  (tmp_path / "labels.csv").write_text("\n".join(lines))
  download_and_prepare.import_source(
    f"csv:{tmp_path}/labels.csv", "own", str(tmp_path), say=lambda line: None
  )
  config = tiny.config(
    total_steps=30,
    data__dataset="own",
    data__data_dir=str(tmp_path),
    data__background="black",
    objective__loss="sigmoid",
    evals={
      "val": {"kind": "multilabel", "split": "train", "ops": OPS},
    },
  )
  run = tmp_path / "run"
  train.train_and_evaluate(config, str(run))
  text = (run / "metrics.jsonl").read_text()
  rows = map(json.loads, text.splitlines())
  (score,) = (row for row in rows if "val/map" in row)
  assert score["val/map"] == 1 and score["val/count"] == 48
  vit = vit_jax.load(run)
  assert vit.ops == "decode(background='black')|resize(16)"
  other = vit_jax.load(run, background="white", image_size=16)
  assert other.ops == "decode(background='white')|resize(16)"
  images = [tmp_path / f"{i}.png" for i in range(4)]
  probable = [
    {p.name for p in answers if p.probability > 0.5}
    for answers in vit.predict(images)
  ]
  assert probable == [set(), {"green"}, {"red"}, {"green", "red"}]

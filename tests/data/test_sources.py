"""Opening data sets: by name, by slice, fake, and every way to fail."""

import re
import subprocess
import sys

import numpy as np
import pytest

from vit_jax.data import (
  dataset_info,
  download_and_prepare,
  fake,
  sources,
  tfds_source,
)
from vit_jax.data.tf_cpu import tf

tfds = pytest.importorskip("tensorflow_datasets")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("tfds"))


def error(*args, **options):
  with pytest.raises(ValueError) as info:
    sources.open_source(*args, **options)
  return str(info.value)


def test_digits_are_made_once_and_then_found(data_dir, capsys):
  source = sources.open_source("digits", "train", data_dir)
  out = capsys.readouterr().out
  assert f"Data set 'digits' is not in {data_dir}/digits" in out
  assert re.search(r"Data set 'digits' generated in \d+ s", out)
  assert (source.num_examples, source.num_classes) == (1297, 10)
  assert source.class_names == tuple("0123456789")
  assert source.name == "digits" and source.split == "train"
  sources.open_source("digits", "test", data_dir)
  assert "generat" not in capsys.readouterr().out


@pytest.mark.nightly
def test_a_race_to_make_a_data_set_ends_well(tmp_path):
  """Two processes at once; both must end with the same records."""
  code = (
    "from vit_jax.data import sources;"
    f"s = sources.open_source('digits', 'train', {str(tmp_path)!r});"
    "print('sum', s.labels().sum())"
  )
  command = [sys.executable, "-c", code]
  runs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
  outputs = [run.communicate()[0].decode() for run in runs]
  assert [run.returncode for run in runs] == [0, 0]
  assert len({output.split("sum")[1] for output in outputs}) == 1
  assert [p.name for p in (tmp_path / "digits").iterdir()] == ["1.1.0"]


def test_slices_read_the_records_that_tfds_reads(data_dir):
  builder = tfds.builder("digits", data_dir=data_dir)
  for split in ("train[:1%]", "train[100:120]+test[-5:]"):
    source = sources.open_source("digits", split, data_dir)
    expected = list(builder.as_data_source(split=split))
    records = list(source.records().as_numpy_iterator())
    assert len(records) == source.num_examples == len(expected)
    np.testing.assert_array_equal(
      source.labels(), [e["label"] for e in expected]
    )
    for i, (record, example) in enumerate(zip(records, expected, strict=True)):
      assert record["index"] == i and record["label"] == example["label"]
      image = tf.io.decode_png(record["image"])
      np.testing.assert_array_equal(image, example["image"])


@pytest.mark.nightly
def test_a_process_that_reads_by_number_ends(data_dir):
  """Though records are being read ahead; unclosed, one of three never ends."""
  code = (
    "from vit_jax.data import pipeline, sources, tfds_source;"
    "tfds_source.MEMORY_LIMIT = 0;"
    f"s = sources.open_source('digits', 'train', {data_dir!r});"
    "b = pipeline.train_batches(s, 'decode|resize(64)', batch_size=64, seed=0);"
    "next(b)"
  )
  for _ in range(5):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# A data set, its split, and what the error names.
MISSING = [
  ("cifar10", "train", "vit-jax prepare cifar10 --data_dir={data_dir}. "),
  ("cifar10:3.*.*", "train", "prepare 'cifar10:3.*.*' --data_dir"),
  ("imagenet2012", "train", "(in which you put ILSVRC2012_img_train.tar"),
  ("cifar01", "train", "Did you mean 'cifar10'?"),
  ("scans", "train", "folder:/path/to/images"),
  ("{cwd}/scans", "train", "write folder:PATH"),
  ("glyphs/size=0", "train", "glyphs/size: got 0"),
  ("cifar10/no_such", "train", "'cifar10/no_such'"),
  # Other features.
  ("coco/2017", "validation", "objects"),
  ("imdb_reviews", "train", "'text'"),
]


def test_data_sets_that_cannot_be_opened(data_dir, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "scans").mkdir()
  for name, split, word in MISSING:
    texts = [x.format(data_dir=data_dir, cwd=tmp_path) for x in (name, word)]
    assert texts[1] in error(texts[0], split, data_dir)
  with pytest.raises(ValueError, match="ILSVRC2012_img_train.tar"):
    download_and_prepare.prepare("imagenet2012", data_dir)
  text = error("imagenet21", "full", data_dir, fake=True)
  assert "Did you mean 'imagenet21k'?" in text


def test_another_version_on_disk_comes_with_its_name(tmp_path):
  for name in ("cifar10", "own"):
    (tmp_path / name / "1.0.0").mkdir(parents=True)
  assert "cifar10:1.0.0" in error("cifar10", "train", str(tmp_path))
  assert "own:1.0.0" in error("own:2.0.0", "train", str(tmp_path))


def test_fake_data_need_nothing_on_disk(tmp_path):
  names = [k for k in dataset_info.DATASETS if not dataset_info.prefix_of(k)]
  for name in (*names, "folder:/nowhere"):
    known = fake.dataset_info(name)
    for split, count in known.splits.items():
      source = sources.open_source(name, split, str(tmp_path), fake=True)
      assert source.num_examples == count
      assert source.num_classes == known.num_classes > 1
  assert not list(tmp_path.iterdir())
  source = sources.open_source("imagenet21k", "full[51200:]", fake=True)
  assert source.num_examples == 14_197_122 - 51_200
  assert source.num_classes == 21_843
  info = fake.dataset_info("glyphs/count=300,size=40")
  assert info.splits["train"] == 300 and info.size == (40, 40)
  assert fake.dataset_info("mnist").num_classes == 10  # Not in the table.


def test_dataset_info_agrees_with_tfds(data_dir):
  for name, known in dataset_info.DATASETS.items():
    if name in ("imagenet21k", "glyphs") or dataset_info.prefix_of(name):
      continue
    builder = tfds.builder(name, data_dir=data_dir)
    label = tfds_source.find_label(builder.info.features)
    assert len(label.names) == known.num_classes, name
    assert label.is_multilabel == known.is_multilabel, name
  digits = sources.open_source("digits", "train+test", data_dir)
  assert digits.num_examples == sum(
    dataset_info.DATASETS["digits"].splits.values()
  )


def test_a_slice_of_fake_data_holds_the_same_records():
  whole = sources.open_source("cifar10", "train", fake=True)
  part = sources.open_source("cifar10", "test[5:7]+train[1000:1003]", fake=True)
  records = list(part.records(2, 5))
  for record, same in zip(records, whole.records(1000, 1003), strict=True):
    assert record["label"] == same["label"]
    assert record["image"] == same["image"]
  assert [int(r["index"]) for r in records] == [2, 3, 4]
  np.testing.assert_array_equal(part.labels(), [5, 6, 0, 1, 2])
  assert np.bincount(whole.labels()).tolist() == [5000] * 10


def test_devices_are_left_to_jax():
  assert tf.config.get_visible_devices("GPU") == []
  assert tf.config.get_visible_devices("TPU") == []

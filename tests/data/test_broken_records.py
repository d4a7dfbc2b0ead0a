"""Records in files of TFDS that cannot be used: named, counted, or an error."""

import pytest
from importable import write_folder
from numbered import scored, unusable

from vit_jax.batch import DataError
from vit_jax.data import download_and_prepare, pipeline, sources
from vit_jax.data.tf_cpu import tf


def damage(example, kind):
  """Returns a serialized record without what it should have."""
  record = tf.train.Example.FromString(example)
  feature = record.features.feature
  if kind == "garbage":
    return b"\xff" * 40
  if kind == "label 7":
    feature["label"].int64_list.value[:] = [7]
  elif kind == "text for label":
    feature["label"].bytes_list.value[:] = [b"a"]
  else:
    del feature[kind]
  return record.SerializeToString()


# What is damaged -> a key word of the reason, of streams and in memory.
REASONS = {
  # First, so that TensorFlow's error has its bytes, which are no text.
  "garbage": ("cannot be parsed", "no bytes"),
  "image": ("no bytes", "no bytes"),
  "label": ("no label", "no label"),
  "label 7": ("label 7", "label 7"),
  "text for label": ("cannot be parsed", "no bytes"),
}


def damaged_source(root, num_left=12):
  """Returns twelve records and their file, the first `num_left` of them.

  The first, third, ... are damaged, as long as there are kinds.
  """
  download_and_prepare.import_source(
    write_folder(root / "in"), "own", str(root), file_format="tfrecord"
  )
  (file,) = root.glob("own/1.0.0/own-train.tfrecord*")
  records = [r.numpy() for r in tf.data.TFRecordDataset(str(file))]
  for i, kind in enumerate(REASONS):
    records[2 * i] = damage(records[2 * i], kind)
  with tf.io.TFRecordWriter(str(file)) as writer:
    for record in records[:num_left]:
      writer.write(record)
  return sources.open_source("own", "train", str(root)), file


@pytest.mark.slow
def test_records_of_tfds_without_their_fields(tmp_path, caplog, monkeypatch):
  for in_memory in (True, False):
    caplog.clear()
    source, _ = damaged_source(tmp_path / str(in_memory))
    batch = scored(source, "decode|resize(4)")
    assert batch["mask"].tolist() == [False, True] * 5 + [True] * 2
    lines = unusable(caplog)
    assert len(lines) == 5
    for i, reasons in enumerate(REASONS.values()):
      (line,) = (m for m in lines if f"record {2 * i} of 'own'" in m)
      assert reasons[in_memory] in line
    assert set(source.labels()[[0, 4, 6]].tolist()) == {-1}
    monkeypatch.setattr("vit_jax.data.tfds_source.MEMORY_LIMIT", 0)


@pytest.mark.slow
def test_a_store_that_fails_is_no_broken_record(tmp_path, monkeypatch):
  """Where many records are parsed at once, and where one by one."""
  monkeypatch.setattr("vit_jax.data.tfds_source.MEMORY_LIMIT", 0)
  source, _ = damaged_source(tmp_path)
  as_stored = type(source).raw

  def one_of_many_is_damaged(*_):
    raise tf.errors.InvalidArgumentError(None, None, "cannot be parsed")

  def fail(index):
    if index == 7:
      raise tf.errors.UnavailableError(None, None, "no answer")
    return index

  def check(record):
    index = tf.numpy_function(fail, [record["index"]], tf.int64)
    return record | {"index": tf.ensure_shape(index, [])}

  monkeypatch.setattr(type(source), "columns", one_of_many_is_damaged)
  assert set(source.labels()[[4, 6]].tolist()) == {-1}
  failing = lambda self, *span: as_stored(self, *span).map(check)
  monkeypatch.setattr(type(source), "raw", failing)
  with pytest.raises(DataError, match="'own' .*no answer"):
    source.labels()


@pytest.mark.nightly
def test_a_file_with_too_few_records_is_an_error(tmp_path, monkeypatch):
  """TensorFlow takes it for whole, and gives later records wrong numbers."""
  source, file = damaged_source(tmp_path, num_left=3)
  ops = "decode|resize(4)"

  def assert_refused(read):
    with pytest.raises(DataError, match=f"{file} has fewer records"):
      read()

  assert_refused(source.labels)
  assert_refused(lambda: scored(source, ops))
  monkeypatch.setattr("vit_jax.data.tfds_source.MEMORY_LIMIT", 0)
  source = sources.open_source("own", "train", str(tmp_path))
  train = pipeline.train_batches(source, ops, batch_size=12, seed=0)
  assert_refused(source.labels)
  assert_refused(lambda: next(train))

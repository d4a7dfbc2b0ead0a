"""Every format's records, and nested subsets of a split by size and seed."""

import functools
import itertools

import numpy as np
import pytest
from numbered import assert_same, global_batches

from vit_jax.data import (
  sources,
  splits,
  subsets,
  tfds_records,
  tfds_source,
)
from vit_jax.data.tf_cpu import tf

tfds = pytest.importorskip("tensorflow_datasets")

OPTIONS = dict(
  ops="decode|resize(8)|flip_lr", batch_size=32, seed=3, shuffle_buffer=64
)
SIZES = {"train": 1297, "test": 500}


def test_members_are_the_same_on_every_machine():
  assert subsets.members(10, 4, 0).tolist() == [2, 3, 4, 6]
  assert subsets.members(10, 4, 1).tolist() == [1, 4, 5, 9]
  expected = [3212, 21474, 45439, 64433, 98149]
  assert subsets.members(100_000, 5, 1).tolist() == expected


@pytest.mark.parametrize("seed", [0, 7])
def test_smaller_subsets_lie_inside_larger_ones(seed):
  drawn = [subsets.members(997, n, seed) for n in (1, 10, 11, 500, 996, 997)]
  for small, large in itertools.pairwise(drawn):
    assert set(small) < set(large)
    assert (np.diff(large) > 0).all()
  assert drawn[-1].tolist() == list(range(997))


def test_members_are_drawn_as_if_at_random():
  # Every record is in a tenth of 2,000 subsets: 200 of them, with a standard
  # deviation of 13.4; so are neighbours, together in a hundredth of them.
  counts = np.zeros(100)
  pairs = 0
  for seed in range(2000):
    drawn = subsets.members(100, 10, seed)
    counts[drawn] += 1
    pairs += (np.diff(drawn) == 1).sum()
  assert np.abs(counts - 200).max() < 5 * 13.4
  expected = 2000 * 99 * (10 * 9) / (100 * 99)
  assert abs(pairs - expected) < 5 * expected**0.5


@pytest.mark.parametrize(
  "text,count",
  [
    ("train@1297", 1297),
    ("train + test@100% ", 1797),
    ("train[5:]+test[:10]@0.5%/seed=12", 7),
  ],
)
def test_a_split_says_how_many_records_it_has(text, count):
  assert splits.num_examples(text, SIZES) == count
  source = sources.open_source("digits", text, fake=True)
  assert (source.num_examples, source.split) == (count, text)


@pytest.mark.parametrize(
  "text,message",
  [
    ("train@1.5", "got split 'train@1.5', expected one subset at"),
    (
      "train@5+test@5",
      r"got split 'train@5\+test@5', expected one subset at the end",
    ),
    (
      "train@50/sed=1",
      "got split 'train@50/sed=1', .* 'train\\+test@10%/seed=1'",
    ),
    ("train@1298", "expected a subset of 1 to 1,297 records"),
    ("test@0.01%", "expected a subset of 1 to 500 records"),
  ],
)
def test_wrong_subsets_are_explained(text, message):
  with pytest.raises(splits.SplitError, match=message):
    splits.num_examples(text, SIZES)
  with pytest.raises(splits.SplitError, match=message):
    sources.open_source("digits", text, fake=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """The digits, in five files of each format: format -> builder."""
  made = {}
  for file_format in ("tfrecord", "array_record"):
    path = tmp_path_factory.mktemp(file_format)
    builder = tfds.builder("digits", data_dir=path, file_format=file_format)
    config = tfds.download.DownloadConfig(num_shards=5)
    builder.download_and_prepare(download_config=config)
    made[file_format] = builder
  return made


def open_from(builder, monkeypatch, **options):
  """Returns a function that opens splits of what the builder prepared."""
  monkeypatch.setattr(tfds_source, "find_builder", lambda *_, **__: builder)
  return functools.partial(sources.open_source, "digits", **options)


@pytest.mark.parametrize(
  "split",
  [pytest.param("train", marks=pytest.mark.slow), "train[7:200]+test[10:20]"],
)
def test_every_format_gives_the_same_records(prepared, monkeypatch, split):
  memory = open_from(prepared["tfrecord"], monkeypatch)(split)
  assert isinstance(memory, tfds_records.TfdsMemory)
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  stream = open_from(prepared["tfrecord"], monkeypatch)(split)
  by_number = open_from(prepared["array_record"], monkeypatch)(split)
  assert not stream.is_by_number and by_number.is_by_number
  # Before a run, nothing may ask for labels that take reading the files.
  assert memory.knows_labels
  assert not stream.knows_labels and not by_number.knows_labels
  assert len(stream.pieces) > 1
  num = memory.num_examples
  for source in (stream, by_number):
    np.testing.assert_array_equal(source.labels(), memory.labels())
    for start, stop in ((0, num), (num // 2, num // 2 + 3)):
      expected, got = (list(s.records(start, stop)) for s in (memory, source))
      for x, y in zip(expected, got, strict=True):
        assert all((x[key] == y[key]).numpy() for key in x)
  some = np.array([0, 5, num - 1])
  at = [by_number.load(raw)["label"].numpy() for raw in by_number.raw_at(some)]
  np.testing.assert_array_equal(at, memory.labels()[some])
  # In any order, as training asks for them.
  raw = by_number.fetch(tf.constant(some[::-1], tf.int64))
  np.testing.assert_array_equal(raw["index"], some[::-1])
  if split != "train":
    return
  train = [global_batches(s, 1, **OPTIONS) for s in (memory, by_number)]
  assert_same(*train)


@pytest.fixture(
  params=[
    "by number",
    *(
      pytest.param(k, marks=pytest.mark.slow)
      for k in ("streamed", "memory", "fake")
    ),
  ]
)
def opened(request, prepared, monkeypatch):
  """A kind of source, and a function that opens splits of the digits so."""
  kind = request.param
  if kind in ("by number", "streamed"):
    monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  builder = prepared["tfrecord" if kind == "streamed" else "array_record"]
  return kind, open_from(builder, monkeypatch, fake=kind == "fake")


@pytest.mark.slow
def test_a_subset_is_those_records_of_the_split(opened):
  kind, open_split = opened
  whole, drawn = open_split("train"), open_split("train@300/seed=1")
  assert drawn.is_by_number == (kind != "streamed")
  assert drawn.knows_labels == (kind in ("memory", "fake"))
  assert isinstance(drawn, tfds_records.TfdsMemory) == (kind == "memory")
  assert drawn.class_names == whole.class_names
  members = subsets.members(1297, 300, 1)
  np.testing.assert_array_equal(drawn.labels(), whole.labels()[members])
  expected = list(whole.records())
  for i, record in enumerate(drawn.records()):
    assert record["index"] == i
    assert record["image"] == expected[members[i]]["image"]
    assert record["label"] == expected[members[i]]["label"]
  some = np.array([0, 7, 299])
  records = [drawn.load(raw) for raw in drawn.raw_at(some)]
  assert [int(r["index"]) for r in records] == some.tolist()
  assert [r["image"] for r in records] == [
    expected[i]["image"] for i in members[some]
  ]
  assert f"record {members[7]} of 'digits'" in drawn.record_name(7)
  assert ("is streamed: every epoch" in drawn.note()) == (kind == "streamed")
  # Parts that end at the last record, continue at the first, or are empty.
  if kind == "streamed":
    for start, stop in ((290, 310), (299, 300), (300, 300), (0, 0)):
      numbers = [int(raw["index"]) for raw in drawn.raw(start, stop)]
      assert numbers == [i % 300 for i in range(start, stop)]


@pytest.mark.slow
def test_batches_of_a_subset_are_a_function_of_seed_and_step(opened):
  _, open_split = opened
  drawn = open_split("train[:90%]@100/seed=1")
  alone = global_batches(drawn, 7, **OPTIONS)  # more than two epochs
  for epoch in range(2):
    numbers = np.concatenate([b["index"] for b in alone])
    numbers = numbers[100 * epoch : 100 * (epoch + 1)]
    assert sorted(numbers) == list(range(100))
  assert_same(global_batches(drawn, 3, 2, **OPTIONS), alone[:3])
  resumed = global_batches(drawn, 2, start_step=5, **OPTIONS)
  assert_same(resumed, alone[5:])
  labels = drawn.labels()
  for batch in alone:
    np.testing.assert_array_equal(batch["label"], labels[batch["index"]])


@pytest.mark.parametrize(
  "file_format",
  ["tfrecord", pytest.param("array_record", marks=pytest.mark.slow)],
)
def test_a_small_subset_of_a_large_split_stays_in_memory(
  file_format, prepared, monkeypatch
):
  """So that streamed files are read once, not once an epoch."""
  open_split = open_from(prepared[file_format], monkeypatch)
  whole = open_split("train")
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", whole.files.file_bytes / 3)
  assert isinstance(open_split("train"), tfds_records.TfdsFiles)
  drawn = open_split("train@30%")
  assert isinstance(drawn, tfds_records.TfdsMemory)
  assert drawn.is_by_number and not drawn.note()
  members = subsets.members(1297, 389, 0)
  np.testing.assert_array_equal(drawn.labels(), whole.labels()[members])
  assert isinstance(open_split("train@40%"), subsets.Subset)


def test_a_subset_of_folders(tmp_path):
  for i in range(60):
    path = tmp_path / "train" / f"c{i % 3}" / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full([4, 4, 3], i, np.uint8)
    path.write_bytes(tf.io.encode_png(image).numpy())
  (tmp_path / "val").symlink_to(tmp_path / "train")
  whole = sources.open_source(f"folder:{tmp_path}", "train")
  drawn = sources.open_source(f"folder:{tmp_path}", "training@50%")
  assert drawn.num_examples == 30
  members = subsets.members(60, 30, 0)
  assert [drawn.record_name(i) for i in range(30)] == [
    whole.paths[i] for i in members
  ]
  np.testing.assert_array_equal(drawn.labels(), whole.labels()[members])
  (tmp_path / "train" / "c0" / "0.png").write_bytes(b"no image")
  broken = [m for m in members if whole.paths[m].endswith("/0.png")]
  rows = global_batches(drawn, 2, **{**OPTIONS, "batch_size": 15})
  assert len(broken) == len(drawn.undecodable) <= 1
  assert len(rows) == 2


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_subset_of_images_with_several_classes(tmp_path, is_in_memory):
  def features(i):
    image = tf.train.BytesList(value=[str(i).encode()])
    labels = tf.train.Int64List(value=range(i % 3))
    return {
      "image": tf.train.Feature(bytes_list=image),
      "labels": tf.train.Feature(int64_list=labels),
    }

  file = str(tmp_path / "x.tfrecord")
  with tf.io.TFRecordWriter(file) as writer:
    for i in range(20):
      example = tf.train.Features(feature=features(i))
      writer.write(tf.train.Example(features=example).SerializeToString())
  whole = tfds_records.TfdsStream(
    name="x",
    split="train",
    num_examples=20,
    num_classes=2,
    is_multilabel=True,
    label_key="labels",
    pieces=(tfds_records.Piece(file, 0, 20),),
    file_bytes=200 * is_in_memory,
  )
  members = subsets.members(20, 7, 0)
  drawn = subsets.Subset.of(whole, members, "train@7")
  source = tfds_source.in_memory_if_small(drawn)
  assert isinstance(source, tfds_records.TfdsMemory) == is_in_memory
  labels = source.labels()
  assert labels.dtype == bool
  expected = [[i % 3 > 0, i % 3 > 1] for i in members]
  np.testing.assert_array_equal(labels, expected)
  for record, number in zip(source.records(), members, strict=True):
    assert record["image"] == str(number).encode()
    assert record["label"].dtype == tf.float32

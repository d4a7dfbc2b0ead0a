"""Every format's records, and nested subsets of a split by size and seed."""

import functools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import encoded, photo, write_classes
from numbered import scored

from vit_jax.data import sources, subsets, tfds_records, tfds_source
from vit_jax.data.tf_cpu import tf


def test_members_are_the_same_on_every_machine():
  assert subsets.members(10, 4, 0).tolist() == [2, 3, 4, 6]
  assert subsets.members(10, 4, 1).tolist() == [1, 4, 5, 9]
  expected = [3212, 21474, 45439, 64433, 98149]
  assert subsets.members(100_000, 5, 1).tolist() == expected


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(1, 997), st.integers(1, 997), st.integers(0, 2**32 - 1))
def test_smaller_subsets_lie_inside_larger_ones(a, b, seed):
  small, large = (subsets.members(997, n, seed) for n in sorted((a, b)))
  assert {*small} <= {*large} <= {*range(997)}
  assert len(small) == min(a, b) and (np.diff(large) > 0).all()


def open_from(builder, monkeypatch, **options):
  """Returns a function that opens splits of what the builder prepared."""
  monkeypatch.setattr(tfds_source, "find_builder", lambda *_, **__: builder)
  return functools.partial(sources.open_source, "digits", **options)


@pytest.mark.slow
def test_every_format_gives_the_same_records(digits_by_format, monkeypatch):
  split = "train[7:200]+test[10:20]"
  files = digits_by_format
  memory = open_from(files["tfrecord"], monkeypatch)(split)
  assert isinstance(memory, tfds_records.TfdsMemory)
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  stream = open_from(files["tfrecord"], monkeypatch)(split)
  by_number = open_from(files["array_record"], monkeypatch)(split)
  assert not stream.is_by_number and by_number.is_by_number
  # Before a run, nothing may ask for labels that take reading the files.
  assert memory.knows_labels
  assert not stream.knows_labels and not by_number.knows_labels
  assert len(stream.pieces) > 1
  expected = list(memory.records().as_numpy_iterator())
  num = len(expected)
  some = np.array([0, 5, num - 1])
  for source in (stream, by_number):
    np.testing.assert_array_equal(source.labels(), memory.labels())
    assert list(source.records().as_numpy_iterator()) == expected
    part = source.records(num // 2, num // 2 + 3)
    assert list(part.as_numpy_iterator()) == expected[num // 2 : num // 2 + 3]
    at = [source.load(raw)["label"].numpy() for raw in source.raw_at(some)]
    np.testing.assert_array_equal(at, memory.labels()[some])
  # In any order, as training asks for them.
  raw = by_number.fetch(tf.constant(some[::-1], tf.int64))
  np.testing.assert_array_equal(raw["index"], some[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["by number", "streamed"])
def test_a_subset_is_those_records_of_the_split(
  kind, digits_by_format, monkeypatch
):
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  form = "tfrecord" if kind == "streamed" else "array_record"
  open_split = open_from(digits_by_format[form], monkeypatch)
  whole, drawn = open_split("train"), open_split("train@300/seed=1")
  assert drawn.is_by_number == (kind != "streamed")
  assert drawn.class_names == whole.class_names
  members = subsets.members(1297, 300, 1)
  np.testing.assert_array_equal(drawn.labels(), whole.labels()[members])
  expected = list(whole.records().as_numpy_iterator())
  expected = [expected[m] | {"index": i} for i, m in enumerate(members)]
  assert list(drawn.records().as_numpy_iterator()) == expected
  some = np.array([0, 7, 299])
  records = [drawn.load(raw) for raw in drawn.raw_at(some)]
  assert [int(r["index"]) for r in records] == some.tolist()
  assert [r["image"] for r in records] == [expected[i]["image"] for i in some]
  assert f"record {members[7]} of 'digits'" in drawn.record_name(7)
  assert ("is streamed" in drawn.note()) == (kind == "streamed")
  # Parts that end at the last record, continue at the first, or are empty.
  if kind == "streamed":
    for start, stop in ((290, 310), (299, 300), (300, 300), (0, 0)):
      numbers = [int(raw["index"]) for raw in drawn.raw(start, stop)]
      assert numbers == [i % 300 for i in range(start, stop)]


@pytest.mark.slow
def test_a_subset_of_a_folder_names_its_files(tmp_path):
  files = {f"{i}.png": encoded(photo(), "PNG") for i in range(20)}
  dataset = write_classes(tmp_path, files)
  whole = sources.open_source(dataset, "train")
  drawn = sources.open_source(dataset, "training@10")
  members = subsets.members(whole.num_examples, 10, 0)
  paths = [whole.paths[i] for i in members]
  assert [drawn.record_name(i) for i in range(10)] == paths
  np.testing.assert_array_equal(drawn.labels(), whole.labels()[members])
  pathlib.Path(paths[7]).write_bytes(b"no image")
  batch = scored(drawn, "decode|resize(4)")
  assert np.flatnonzero(~batch["mask"]).tolist() == [7]
  assert drawn.undecodable == {7}

"""Data sets of TFDS in a bucket: the same batches, by few requests."""

import json
import pathlib
import sys

import object_store
import pytest
import several

FILES = 5  # of `digits_by_format`
# Prints digests of what is read from folders, and the requests for each.
CODE = """
import hashlib, itertools, json, os, sys
import numpy as np
import object_store
from vit_jax.data import pipeline, sources, tfds_source

store = object_store.Admin(os.environ["OBJECT_STORE"])
in_memory = tfds_source.MEMORY_LIMIT

def digest(batches):
  hash = hashlib.sha256()
  for batch in batches:
    for key in sorted(batch):
      hash.update(np.ascontiguousarray(batch[key]).tobytes())
  return hash.hexdigest()

def read(folder, limit):
  tfds_source.MEMORY_LIMIT = limit
  opened = sources.Sources(folder)
  train, test = (opened.open("digits", s) for s in ("train", "test"))
  ops, options = "decode|resize(32)", {"batch_size": 32}
  yield "kind", type(train).__name__
  yield "note", train.note()
  yield "labels", hashlib.sha256(train.labels().tobytes()).hexdigest()
  batches = pipeline.train_batches(train, ops, seed=0, **options)
  yield "train", digest(itertools.islice(batches, 10))
  yield "test", digest(pipeline.eval_reader(test, ops, **options)())
  drawn = opened.open("digits", "train[100:900]@200")
  batches = pipeline.train_batches(drawn, ops, seed=0, **options)
  yield "drawn", digest(itertools.islice(batches, 10))

results = []
for folder in sys.argv[1:]:
  for limit in (in_memory, 0):
    result = {}
    store.reset()
    for name, value in read(folder, limit):
      sizes = [r["sent"] for r in store.requests() if "-of-" in r["object"]]
      result[name] = value, len(sizes), sum(sizes)
      store.reset()
    results.append(result)
print(json.dumps(results), flush=True)
os._exit(0)  # the iterators are not read to their end
"""


@pytest.mark.skipif(
  not object_store.available(), reason="no network namespace can be made"
)
@pytest.mark.nightly
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_batches_are_equal_and_requests_few(digits_by_format, file_format):
  local = pathlib.Path(digits_by_format[file_format].data_dir).parents[1]
  size = sum(f.stat().st_size for f in local.rglob("digits-train*"))
  with object_store.Bucket() as bucket:
    bucket.upload(local)
    command = [sys.executable, "-c", CODE, str(local), "gs://bkt"]
    env = several.env() | {"PYTHONPATH": f"{several.ROOT}:{several.ROOT}/tests"}
    done = bucket.run(command, env, capture_output=True, text=True)
  assert not done.returncode, done.stderr
  # Local and far; in memory and not.
  results = json.loads(done.stdout.splitlines()[-1])
  for limit, (here, far) in enumerate(
    zip(results[:2], results[2:], strict=True)
  ):
    values, counts, sent = (
      {name: result[i] for name, result in far.items()} for i in range(3)
    )
    assert not any(count for _, count, _ in here.values())
    note = values.pop("note")
    assert here.pop("note")[0] == ""
    assert values == {name: value for name, (value, *_) in here.items()}
    by_number = values["kind"] == "TfdsByNumber"
    assert by_number == (limit == 1 and file_format == "array_record")
    assert ("--file_format=tfrecord" in note) == by_number
    # The index at the end of an array_record file is a request of its own.
    each = 2 if file_format == "array_record" else 1
    assert counts["labels"] <= each * FILES
    assert sent["labels"] <= 4 * size
    if limit == 0:  # in memory from then on
      assert counts["train"] == 0
      assert counts["test"] <= each * FILES
    # 500 records in order, and 200 of 800, by 64; threads that open a file at
    # the same time, and a busy machine, add some.
    assert counts["test"] < 100
    assert counts["drawn"] < 100

"""Data sets of TFDS in a bucket: the same batches, by few requests."""

import json
import sys

import object_store
import pytest
import several
import tensorflow_datasets as tfds

from vit_jax.data import builders  # noqa: F401  (TFDS then knows the digits)

FILES = 5
# Prints digests of what is read from a folder, and the requests for each.
CODE = """
import hashlib, itertools, json, os, sys
import numpy as np
import object_store
from vit_jax.data import pipeline, sources, tfds_source

store = object_store.Admin(os.environ["OBJECT_STORE"])
folder, limit = sys.argv[1], int(sys.argv[2])
if limit >= 0:
  tfds_source.MEMORY_LIMIT = limit

def digest(batches):
  hash = hashlib.sha256()
  for batch in batches:
    for key in sorted(batch):
      hash.update(np.ascontiguousarray(batch[key]).tobytes())
  return hash.hexdigest()

def read():
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

result = {}
store.reset()
for name, value in read():
  sizes = [r["sent"] for r in store.requests() if "-of-" in r["object"]]
  result[name] = value, len(sizes), sum(sizes)
  store.reset()
print(json.dumps(result), flush=True)
os._exit(0)  # the iterators are not read to their end
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """The digits, in five files of each format: format -> folder."""
  made = {}
  for file_format in ("tfrecord", "array_record"):
    made[file_format] = path = tmp_path_factory.mktemp(file_format)
    builder = tfds.builder("digits", data_dir=path, file_format=file_format)
    config = tfds.download.DownloadConfig(num_shards=FILES)
    builder.download_and_prepare(download_config=config)
  return made


@pytest.mark.slow
@pytest.mark.skipif(
  not object_store.available(), reason="no network namespace can be made"
)
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("limit", [-1, 0])
def test_batches_are_equal_and_requests_few(prepared, file_format, limit):
  local = prepared[file_format]
  size = sum(f.stat().st_size for f in local.rglob("digits-train*"))

  def read(folder):
    command = [sys.executable, "-c", CODE, str(folder), str(limit)]
    env = several.env() | {"PYTHONPATH": f"{several.ROOT}:{several.ROOT}/tests"}
    done = bucket.run(command, env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    values, counts, sent = zip(*result.values(), strict=True)
    return tuple(
      dict(zip(result, v, strict=True)) for v in (values, counts, sent)
    )

  with object_store.Bucket() as bucket:
    bucket.upload(local)
    expected, counts, _ = read(local)
    assert not any(counts.values())
    values, counts, sent = read("gs://bkt")
  note = values.pop("note")
  assert expected.pop("note") == ""
  assert values == expected
  by_number = values["kind"] == "TfdsByNumber"
  assert by_number == (limit == 0 and file_format == "array_record")
  assert ("--file_format=tfrecord" in note) == by_number
  # The index at the end of an array_record file is a request of its own.
  each = 2 if file_format == "array_record" else 1
  assert counts["labels"] <= each * FILES
  assert sent["labels"] <= 4 * size
  if limit < 0:  # in memory from then on
    assert counts["train"] == 0
    assert counts["test"] <= each * FILES
  # 500 records in order, and 200 of 800, by 64; threads that open a file at
  # the same time, and a busy machine, add some.
  assert counts["test"] < 100
  assert counts["drawn"] < 100

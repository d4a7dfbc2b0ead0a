"""Data sets of TFDS in a bucket: the same batches, by few requests."""

import json
import pathlib
import sys

import object_store
import pytest
import several

# Prints what is read from folders, in memory and not, and the requests for it.
CODE = """
import hashlib, itertools, json, os, sys, urllib.request
import numpy as np
from vit_jax.data import pipeline, sources, tfds_source

log = os.environ["TENSORSTORE_GCS_HTTP_URL"] + "/log"
requests = lambda: json.load(urllib.request.urlopen(log))["requests"]
OPS = "decode|resize(32)"

def digest(batches):
  hash = hashlib.sha256()
  for batch in itertools.islice(batches, 10):
    for key in sorted(batch):
      hash.update(np.ascontiguousarray(batch[key]).tobytes())
  return hash.hexdigest()

def read(folder):
  opened = sources.Sources(folder)
  for split in ("train", "train[100:900]@200"):
    source = opened.open("digits", split)
    yield hashlib.sha256(source.labels().tobytes()).hexdigest()
    yield digest(pipeline.train_batches(source, OPS, batch_size=32, seed=0))
  test = opened.open("digits", "test")
  yield digest(pipeline.eval_batches(test, OPS, batch_size=32))

for limit in (tfds_source.MEMORY_LIMIT, 0):
  tfds_source.MEMORY_LIMIT = limit
  for folder in sys.argv[1:]:
    requests()  # empties the log
    result = [*read(folder)]
    count = sum("-of-" in r["object"] for r in requests())
    print(json.dumps([result, count]), flush=True)
os._exit(0)  # the iterators are not read to their end
"""


@pytest.mark.skipif(
  not object_store.available(), reason="no network namespace can be made"
)
@pytest.mark.nightly
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_batches_are_equal_and_requests_few(digits_by_format, file_format):
  local = pathlib.Path(digits_by_format[file_format].data_dir).parents[1]
  with object_store.Bucket() as bucket:
    bucket.upload(local)
    command = [sys.executable, "-c", CODE, str(local), "gs://bkt"]
    env = several.env() | {"PYTHONPATH": f"{several.ROOT}:{several.ROOT}/tests"}
    done = bucket.run(command, env, capture_output=True, text=True)
  assert not done.returncode, done.stderr
  results = [*map(json.loads, done.stdout.splitlines()[-4:])]
  for (here, none), (far, count) in (results[:2], results[2:]):
    assert here == far and not none
    # In five files of a split, by 64 records at once; not one by one.
    assert 0 < count < 250

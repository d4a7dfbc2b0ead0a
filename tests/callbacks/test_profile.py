"""`train --profile=STEP`: a trace with annotated steps."""

import gzip
import pathlib

import pytest
import tiny

from vit_jax import train
from vit_jax.config import ConfigError

pytestmark = pytest.mark.slow  # clu's profiler loads TensorFlow


def _run(folder: pathlib.Path, **options):
  from vit_jax.callbacks.profile import Profile

  config = tiny.config(total_steps=9, **options)
  data = tiny.Data()
  profile = Profile(str(folder / "tensorboard"), 2)
  train.train_and_evaluate(config, str(folder), data, callbacks=[profile])


def test_the_trace_has_whole_steps(tmp_path):
  _run(tmp_path)
  (path,) = tmp_path.glob("tensorboard/plugins/profile/*/*.trace.json.gz")
  trace = gzip.decompress(path.read_bytes()).decode()
  steps = [n for n in range(1, 10) if f'"step_num":"{n}"' in trace]
  assert steps == [3, 4, 5, 6, 7]
  with pytest.raises(ConfigError, match="--profile: got 2, expected a step af"):
    _run(tmp_path)

"""`train --profile=STEP`: a trace with annotated steps."""

import pathlib

import jax
import pytest
import tiny

from vit_jax import train
from vit_jax.config import ConfigError

pytestmark = pytest.mark.nightly  # clu's profiler loads TensorFlow


def _run(folder: pathlib.Path, **options):
  from vit_jax.callbacks.profile import Profile

  config = tiny.config(total_steps=9, **options)
  data = tiny.Data()
  profile = Profile(str(folder / "tensorboard"), 2)
  train.train_and_evaluate(config, str(folder), data, callbacks=[profile])


def test_the_trace_has_whole_steps(tmp_path):
  _run(tmp_path)
  # The trace in JSON stops at a million events; this file has all.
  (path,) = tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb")
  planes = jax.profiler.ProfileData.from_file(str(path)).planes
  lines = [line for plane in planes for line in plane.lines]
  events = [e for line in lines for e in line.events if e.name == "train"]
  steps = sorted(dict(event.stats)["step_num"] for event in events)
  assert steps == [3, 4, 5, 6, 7]
  with pytest.raises(ConfigError, match="--profile: got 2, expected a step af"):
    _run(tmp_path)

"""A run goes on on other devices, and with its blocks in another form.

The trials "elsewhere" of `make faults` have other meshes, and processes.
"""

import shutil

import jax
import numpy as np
import pytest
import tiny
from faults.elsewhere import difference

from vit_jax import sharding, train
from vit_jax.writers.metric_writer import read_metrics


@pytest.mark.faults
@pytest.mark.nightly
def test_losses_are_those_of_the_run_that_stayed(tmp_path, monkeypatch):
  def trained(folder, **changes):
    config = tiny.config(
      total_steps=6,
      log_steps=1,
      checkpoint__every_steps=3,
      data__dataset="digits",
      model__depth=2,
      model__dropout=0.1,
      **changes,
    )
    state = train.train_and_evaluate(config, str(folder))
    return state, read_metrics(str(folder))

  _, want = trained(tmp_path / "stayed", mesh__fsdp=8)
  shutil.copytree(tmp_path / "stayed", tmp_path / "run")
  shutil.rmtree(tmp_path / "run/checkpoints/6")
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(
    sharding, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:2])
  )
  state, got = trained(tmp_path / "run", mesh__tensor=2, model__scan=True)
  assert "encoderblock" in state.params["Transformer"]
  # Devices add float32 in another order.
  assert difference(want, got) < 1e-5
  assert [r["step"] for r in got] == [1, 2, 3, 4, 5, 6]
  sums = [np.sum([r["train/epoch"] for r in rows]) for rows in (want, got)]
  assert sums[0] == sums[1]

"""A run goes on on other devices, and with its blocks in another form."""

import functools
import shutil

import jax
import numpy as np
import pytest
import tiny
from faults.elsewhere import difference

from vit_jax import sharding, train
from vit_jax.config import Config, defaults, freeze, to_dict
from vit_jax.writers.metric_writer import read_metrics


def _config(**changes) -> Config:
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=6, model__dropout=0.1)))
  c.data.dataset = "digits"
  c.log_steps = 1
  c.checkpoint.every_steps, c.checkpoint.keep_last = 3, 2
  tiny.apply(c, changes)
  return freeze(c)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory):
  """Returns the folder of a run by whether its blocks are in a scan."""

  @functools.cache
  def trained(scan):
    folder = tmp_path_factory.mktemp(f"scan{scan}")
    config = _config(model__scan=scan, mesh__fsdp=4)
    train.train_and_evaluate(config, str(folder))
    return folder

  return trained


@pytest.mark.parametrize(
  "scan, num_devices, changes",
  [
    pytest.param(
      *(False, 2, {"mesh__tensor": 2, "model__scan": True}),
      marks=pytest.mark.slow,
    ),
    pytest.param(True, 1, {"model__scan": False}, marks=pytest.mark.nightly),
    pytest.param(False, 4, {"mesh__fsdp": 2}, marks=pytest.mark.nightly),
    pytest.param(True, 8, {"mesh__tensor": 4}, marks=pytest.mark.nightly),
  ],
)
def test_losses_are_those_of_the_run_that_stayed(
  stayed, tmp_path, monkeypatch, scan, num_devices, changes
):
  shutil.copytree(stayed(scan), tmp_path / "run")
  shutil.rmtree(tmp_path / "run/checkpoints/6")
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(
    sharding, "make_mesh", lambda m: make_mesh(m, jax.devices()[:num_devices])
  )
  changes = {"model__scan": scan, **changes}
  state = train.train_and_evaluate(_config(**changes), str(tmp_path / "run"))
  blocks = state.params["Transformer"].keys()
  assert ("encoderblock" in blocks) == changes["model__scan"]
  want, got = (
    read_metrics(str(path)) for path in (stayed(scan), tmp_path / "run")
  )
  # Devices add float32 in another order.
  assert difference(want, got) < 1e-5
  assert [r["step"] for r in got] == [1, 2, 3, 4, 5, 6]
  sums = [np.sum([r["train/epoch"] for r in rows]) for rows in (want, got)]
  assert sums[0] == sums[1]

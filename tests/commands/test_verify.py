"""`verify`: a line for each checkpoint of a run."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax.checkpointing import checkpointer
from vit_jax.commands import verify
from vit_jax.config import CheckpointConfig


@pytest.fixture
def run(tmp_path):
  """Steps 1 and 2."""
  shapes = tiny.Parts(
    tiny.config(model__depth=1, optim__name="sgd"), jax.devices()[:1]
  ).shapes
  rng = np.random.default_rng(0)
  state = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes
  )
  saver = checkpointer.Checkpointer(str(tmp_path / "run"), CheckpointConfig())
  for step in (1, 2):
    saver.save_now(step, jax.device_put(state), {"class_names": ["a"]})
  saver.close()
  return tmp_path / "run"


def test_verify_prints_a_line_each(run, capsys, monkeypatch):
  monkeypatch.chdir(run.parent)  # a path from here
  verify.main([run.name])
  assert capsys.readouterr().out.count(" ok: ") == 2
  arrays = run / "checkpoints/1/train/ocdbt.process_0/d"
  largest = max(arrays.iterdir(), key=lambda p: p.stat().st_size)
  raw = bytearray(largest.read_bytes())
  raw[len(raw) // 2] ^= 1
  largest.write_bytes(raw)
  with pytest.raises(SystemExit, match="1 of 2 damaged"):
    verify.main([str(run)])
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith("step 1          damaged: train/opt_state/")
  assert second.startswith("step 2          ok: ")
  verify.main([str(run), "2"])
  with pytest.raises(SystemExit, match="got no step 3; there is 1, 2"):
    verify.main([str(run), "3"])

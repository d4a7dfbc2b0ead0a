"""What a config reads of a run before the processes have joined."""

import subprocess
import sys

import pytest
import several
from weight_files import MODEL, nested, our_params

from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import to_dict

# jax refuses to join if it has started.
JOIN = """
import sys
import jax
from vit_jax import config
config.recipe(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 1, 0)
"""


@pytest.fixture
def run(tmp_path):
  """The folder of a run, with a checkpoint."""
  metadata = {"config": {"model": to_dict(MODEL)}, "image_size": [32, 32]}
  step = tmp_path / "checkpoints/5"
  checkpointer.write_params(str(step), nested(our_params()), metadata)
  return tmp_path


def test_shapes_are_those_of_the_arrays(run):
  file, shapes = weights.read(run), weights.read_shapes(run)
  of = lambda w: {k: (v.shape, v.dtype) for k, v in w.params.items()}
  assert of(shapes) == of(file)
  for fn in (weights.model_to_finetune, weights.trained_at):
    assert fn(shapes) == fn(file)


def test_a_config_reads_a_run_before_processes_join(run):
  config = f"finetune:dataset=cifar10,init={run}"
  command = [sys.executable, "-c", JOIN, config, several.address()]
  subprocess.run(command, check=True, env=several.env())

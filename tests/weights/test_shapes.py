"""What a config reads of a run before the processes have joined."""

import subprocess
import sys

import several

from vit_jax import weights

# jax refuses this if it has started.
JOIN = """
import sys
import jax
from vit_jax import config
config.recipe(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 1, 0)
"""


def test_shapes_of_a_run_are_those_of_its_arrays(run):
  file, shapes = (f(run.workdir) for f in (weights.read, weights.read_shapes))
  of = lambda w: {k: (v.shape, v.dtype) for k, v in w.params.items()}
  assert of(shapes) == of(file)
  for fn in (weights.model_to_finetune, weights.trained_at):
    assert fn(shapes) == fn(file)


def test_a_config_reads_a_run_before_processes_join(run):
  config = f"finetune:dataset=cifar10,init={run.workdir}"
  command = [sys.executable, "-c", JOIN, config, several.address()]
  subprocess.run(command, check=True, env=several.env())

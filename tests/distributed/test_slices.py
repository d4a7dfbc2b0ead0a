"""Several TPU slices: each holds whole copies, and only sums pass between them.

Devices of a CPU stand for chips, and processes for slices.
"""

import json
import re
import sys

import jax
import numpy as np
import pytest
import several
import tiny

from vit_jax import run_checks, sharding
from vit_jax.config import MeshConfig

# Four processes with two devices each; two processes are a slice.
PROCESS = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2]))
import numpy as np
import tiny
from vit_jax import sharding

sharding.slice_of = lambda device: device.process_index // 2
parts = tiny.Parts(tiny.config(mesh__fsdp=-1, optim__name="sgd"))
of_slice = [sorted({sharding.slice_of(d) for d in row.flat})
            for row in parts.mesh.devices]
whole = tiny.batch
rows = slice(4 * int(sys.argv[2]), 4 * int(sys.argv[2]) + 4)
tiny.batch = lambda *a: {k: v[rows] for k, v in whole(*a).items()}
results = parts.run(3)[1], dict(parts.mesh.shape), of_slice
print("RESULTS" + json.dumps(results), flush=True)
jax.distributed.shutdown()
"""


@pytest.fixture
def two_slices(monkeypatch):
  """Even and odd devices are of two slices."""
  monkeypatch.setattr(sharding, "slice_of", lambda device: device.id % 2)


@pytest.mark.parametrize(
  "asked, shape",
  [
    (MeshConfig(), (8, 1, 1)),
    (MeshConfig(fsdp=-1), (2, 4, 1)),
    (MeshConfig(fsdp=2, tensor=2), (2, 2, 2)),
  ],
)
def test_data_alone_joins_slices(two_slices, asked, shape):
  mesh = sharding.make_mesh(asked)
  assert mesh.devices.shape == shape
  assert sharding.shape_here(asked) == dict(mesh.shape)
  of_copy = [{d.id % 2 for d in row.flat} for row in mesh.devices]
  half = shape[0] // 2
  assert of_copy == [{0}] * half + [{1}] * half


def test_a_state_does_not_span_slices(two_slices):
  config = tiny.config(mesh__data=1, mesh__fsdp=8)
  (error,) = run_checks.mesh_errors(config)
  assert error.startswith("config.mesh: ") and "multiple of 2" in error
  with pytest.raises(ValueError, match=re.escape(error)):
    sharding.make_mesh(config.mesh)


def test_fsdp_divides_a_slice_and_not_the_whole():
  mesh = MeshConfig(data=-1, fsdp=-1)
  assert sharding.mesh_shape(mesh, 24, 1)["fsdp"] == 12
  assert sharding.mesh_shape(mesh, 24, 3) == dict(data=3, fsdp=8, tensor=1)


@pytest.mark.nightly
def test_processes_that_stand_for_slices_train_as_one():
  address, root = several.address(), several.ROOT
  env = several.env(2) | {
    "PYTHONPATH": f"{root}:{root / 'tests'}",
    "JAX_PLATFORMS": "cpu",
  }
  commands = [
    [sys.executable, "-c", PROCESS, address, str(i)] for i in range(4)
  ]
  outputs = several.outputs(commands, env)
  results = [json.loads(out.split("RESULTS")[1]) for out in outputs]
  assert all(other == results[0] for other in results)
  metrics, shape, of_slice = results[0]
  assert shape == {"data": 2, "fsdp": 4, "tensor": 1}
  assert of_slice == [[0], [1]]
  config = tiny.config(optim__name="sgd")
  one = tiny.Parts(config, jax.devices()[:1]).run(3)[1]
  for got, expected in zip(metrics, one, strict=True):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
      # Devices add float32 in another order.
      np.testing.assert_allclose(got[key], value, 1e-5, err_msg=key)

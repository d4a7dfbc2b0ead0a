"""Our parameters in other code, and other code's in ours.

tests/test_docs.py runs docs/tasks/convert.md, which says how to do this.
"""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import several
import tiny
from flax import nnx
from flax.training.train_state import TrainState

import vit_jax
from vit_jax import train
from vit_jax.families.vit import ViTConfig
from vit_jax.models.stacking import stack_blocks

ROOT = several.ROOT
DATA = ROOT / "tests" / "data"
MODULE = (ROOT / "docs/tasks/plain_vit.py").read_text()
PAGE = (ROOT / "docs/tasks/convert.md").read_text()

# Logits are sums of some hundred products in several layers; in another order,
# each rounds at 6e-8 of its value. 7e-7 of the largest logit was the most seen.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(DATA / "vit_token.weights.npz", verbose=False)


def images(vit, rows=2):
  rng = np.random.default_rng(0)
  return np.float32(rng.uniform(-1, 1, (rows, *vit.image_size, 3)))


def assert_same(got, expected, rtol=TOLERANCE):
  got, expected = np.asarray(got), np.asarray(expected)
  assert got.shape == expected.shape
  assert np.abs(got - expected).max() < rtol * np.abs(expected).max()


RESTORE = """
import json, jax, numpy as np
from plain_vit import ViT, restore
folder, io, fields = sys.argv[1:]
io, model = np.load(io), ViT(**json.loads(fields))
params = restore(folder, model, io["images"])
logits = jax.jit(model.apply)({"params": params}, io["images"])
np.save("logits.npy", logits)
print(jax.device_count(), {type(x).__name__ for x in jax.tree.leaves(params)})
"""


ALONE = 'import sys; sys.modules["vit_jax"] = None\n'  # vit_jax is not there


def outside(code: str, folder, *args) -> str:
  """Runs code on one device, in a process without checks of types."""
  out = subprocess.run(
    [sys.executable, "-c", code, *map(str, args)],
    cwd=folder,
    env={**several.env(), "PYTHONPATH": str(several.ROOT)},
    capture_output=True,
    text=True,
  )
  assert out.returncode == 0, out.stderr
  return out.stdout


@pytest.mark.slow
def test_a_run_on_eight_devices_is_read_by_orbax_alone(tmp_path):
  """Its averaged parameters, in a process that has one device."""
  options = dict(model__pool="gap", model__depth=1, optim__ema_decay=0.5)
  config = tiny.config(**options, mesh__fsdp=8, total_steps=2)
  train.train_and_evaluate(config, str(tmp_path / "run"), tiny.Data())
  vit = vit_jax.load(tmp_path / "run", verbose=False)
  step = tmp_path / "run/checkpoints/2"
  like = jax.eval_shape(lambda: vit.params)
  got = ocp.v1.load(step, like, checkpointable_name="params")
  jax.tree.map(np.testing.assert_array_equal, got, vit.params)

  (tmp_path / "plain_vit.py").write_text(MODULE)  # the docs' module
  x, c = images(vit), vit.config
  np.savez(tmp_path / "io.npz", images=x)
  fields = dict(
    patch=int(c.variant.split("/")[1]),
    width=c.size.width,
    depth=c.size.depth,
    heads=c.size.num_heads,
    hidden=c.size.mlp_dim,
    classes=vit.num_classes,
    pool=c.pool,
  )
  arguments = step / "params", "io.npz", json.dumps(fields)
  printed = outside(ALONE + RESTORE, tmp_path, *arguments)
  assert printed == "1 {'ArrayImpl'}\n"
  assert_same(np.load(tmp_path / "logits.npy"), vit(x)[0])


@pytest.mark.parametrize(
  "writer", ["manager", pytest.param("v1", marks=pytest.mark.slow)]
)
def test_trees_of_others_are_read(vit, tmp_path, monkeypatch, writer):
  """Parameters, and a state whose blocks are stacked."""
  monkeypatch.chdir(tmp_path)
  if writer == "manager":
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
      manager.save(5, args=ocp.args.StandardSave(vit.params))
    got = vit_jax.load("theirs/5", verbose=False)
  else:
    params, tx = stack_blocks(vit.params, ViTConfig), optax.adam(1e-3)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.chain(tx))
    ocp.v1.save(tmp_path / "theirs", state)
    got = vit_jax.load("theirs", verbose=False)
  jax.tree.map(np.testing.assert_array_equal, got.params, vit.params)
  assert got.config == vit.config and got.image_size == vit.image_size


@pytest.mark.slow
def test_a_model_of_ours_is_one_of_nnx(vit, tmp_path):
  module, x = vit.nnx(), images(vit)
  state = nnx.state(module)
  assert {type(leaf) for leaf in jax.tree.leaves(state)} == {
    type(jax.numpy.zeros(()))
  }
  jax.tree.map(
    np.testing.assert_array_equal, nnx.to_pure_dict(state), vit.params
  )
  logits, out = nnx.jit(lambda module, x: module(x))(module, x)
  assert_same(logits, vit(x)[0])
  assert out["pre_logits"].shape == (2, 48)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "nnx", nnx.state(module, nnx.Param))
  got = vit_jax.load(tmp_path / "nnx", verbose=False, gelu=vit.config.gelu)
  jax.tree.map(np.testing.assert_array_equal, got.params, vit.params)


CALL = """
import jax.export
import numpy as np
data = open(sys.argv[1], "rb").read()
exported = jax.export.deserialize(bytearray(data))
x = np.load("images.npy")
logits = [np.asarray(exported.call(x[:n])) for n in (1, 2, len(x))]
np.savez("logits.npz", *logits)
for wrong in (x[:, :-1], x.astype(np.float16)):
  try:
    exported.call(wrong)
  except ValueError:
    print("refused")
assert "flax" not in sys.modules
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
  "name, options",
  [
    ("vit_token", {"image_size": (16, 40), "dtype": "bfloat16"}),
    ("bit_v2", {}),
  ],
)
def test_exported_models_need_jax_alone(name, options, tmp_path):
  vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False, **options)
  (tmp_path / "model").write_bytes(vit.export())
  x = images(vit, rows=5)
  np.save(tmp_path / "images.npy", x)
  assert outside(ALONE + CALL, tmp_path, "model") == "refused\n" * 2
  with np.load(tmp_path / "logits.npz") as file:
    logits = dict(file)
  # 8 bits of mantissa: what rounds otherwise differs by 2^-8.
  rtol = 0.02 if "dtype" in options else TOLERANCE
  for key, rows in zip(logits, (1, 2, 5), strict=True):
    assert_same(logits[key], vit(x[:rows])[0], rtol)


@pytest.mark.slow
def test_an_export_states_its_platforms(vit):
  for platforms in (("cpu",), ("cuda", "tpu")):
    data = bytearray(vit.export(platforms=platforms))
    assert jax.export.deserialize(data).platforms == platforms
  for wrong in ("gpu", ()):
    with pytest.raises(ValueError, match="platforms"):
      vit.export(platforms=wrong)


COMPARE = """
import numpy as np
x = np.random.default_rng(0).uniform(-1, 1, (64, *vit.image_shape))
x = x.astype(np.float32)
got, expected = jax.jit(model.apply)({"params": params}, x)[0], vit(x)[0]
print(np.abs(got - expected).max() / np.abs(expected).max())
"""


@pytest.mark.nightly
def test_int8_by_qwix_as_in_the_docs(tmp_path):
  pytest.importorskip("qwix")
  (code,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.M | re.S)
  # A weight or an input changes by at most 1/254 of the largest; changes of
  # several layers add up. The most seen was 0.015 of the largest logit.
  assert 0 < float(outside(code + COMPARE, tmp_path)) < 0.03

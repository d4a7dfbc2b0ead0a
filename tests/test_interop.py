"""Our parameters in other code, and other code's in ours.

tests/test_docs.py runs docs/tasks/convert.md, which says how to do this.
"""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import vit_jax
from vit_jax import train
from vit_jax.checkpointing import checkpointer as checkpointer_lib
from vit_jax.config import defaults, freeze
from vit_jax.families.vit import ViTConfig
from vit_jax.models.stacking import stack_blocks

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
MODULE = (ROOT / "docs/tasks/plain_vit.py").read_text()
PAGE = (ROOT / "docs/tasks/convert.md").read_text()

# Logits are sums of some hundred products in several layers; in another order,
# each rounds at 6e-8 of its value. 7e-7 of the largest logit was the most seen.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(DATA / "vit_token.weights.npz", verbose=False)


@pytest.fixture
def docs_module(tmp_path, monkeypatch):
  (tmp_path / "plain_vit.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "plain_vit", raising=False)
  return importlib.import_module("plain_vit")


@pytest.fixture
def plain_vit(docs_module):
  """The module of the docs, for parameters of the fixture `vit`."""
  return docs_module.ViT(8, 48, 3, 4, 96, 11)


def images(vit, rows=2):
  rng = np.random.default_rng(0)
  return np.float32(rng.uniform(-1, 1, (rows, *vit.image_size, 3)))


def assert_same(got, expected):
  got, expected = np.asarray(got), np.asarray(expected)
  assert got.shape == expected.shape
  assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


def alone(code: str, folder, *args) -> str:
  """Runs code on one device, in a process in which vit_jax is not there."""
  hide = 'import sys; sys.modules["vit_jax"] = None\n'
  return outside(hide + code, folder, *args)


def outside(code: str, folder, *args) -> str:
  """Runs code on one device, in a process without checks of types."""
  env = dict(os.environ, JAX_PLATFORMS="cpu")
  env.pop("XLA_FLAGS", None)
  out = subprocess.run(
    [sys.executable, "-c", code, *map(str, args)],
    cwd=folder,
    env=env,
    capture_output=True,
    text=True,
  )
  assert out.returncode == 0, out.stderr
  return out.stdout


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


def restore(vit, folder, tmp_path):
  """Returns images, and logits of the docs' module with params of `folder`."""
  (tmp_path / "plain_vit.py").write_text(MODULE)
  x, c = images(vit), vit.config
  np.savez(tmp_path / "io.npz", images=x)
  fields = dict(
    patch=int(c.variant.split("/")[1]),
    width=c.width,
    depth=c.depth,
    heads=c.num_heads,
    hidden=c.mlp_dim,
    classes=vit.num_classes,
    pool=c.pool,
  )
  printed = alone(RESTORE, tmp_path, folder, "io.npz", json.dumps(fields))
  assert printed == "1 {'ArrayImpl'}\n"
  return x, np.load(tmp_path / "logits.npy")


@pytest.mark.slow
def test_the_docs_module_has_models_without_a_class_token(docs_module):
  vit = vit_jax.load(DATA / "vit_gap.weights.npz", pool="gap", verbose=False)
  c, x = vit.config, images(vit)
  sizes = c.size
  model = docs_module.ViT(
    *(8, sizes.width, sizes.depth, sizes.num_heads, sizes.mlp_dim),
    vit.num_classes,
    pool="gap",
  )
  assert_same(model.apply({"params": vit.params}, x), vit(x)[0])


@pytest.mark.slow
def test_sharded_parameters_are_read_on_one_device(vit, tmp_path):
  mesh = jax.make_mesh((8,), ("fsdp",))
  assert mesh.size == 8

  def spread(x):
    axis = next((i for i, n in enumerate(x.shape) if n % 8 == 0), None)
    names = [None] * x.ndim
    if axis is not None:
      names[axis] = "fsdp"
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))

  params = jax.tree.map(spread, vit.params)
  assert not params["head"]["kernel"].is_fully_replicated
  checkpointer_lib.write_params(str(tmp_path / "out"), params, vit.metadata())
  x, logits = restore(vit, tmp_path / "out" / "params", tmp_path)
  assert_same(logits, vit(x)[0])


@pytest.mark.nightly
def test_a_trained_run_is_read_by_orbax_alone(tmp_path):
  c = defaults()
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 2
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.model.pool = "gap"  # as `make demo` and the config `glyphs`
  c.data.dataset, c.data.ops = "digits", "decode|resize(16)"
  c.data.batch_size, c.total_steps = 32, 3
  c.optim.ema_decay = 0.5  # the parameters to be read are the averaged ones
  train.train_and_evaluate(freeze(c), str(tmp_path / "run"))
  vit = vit_jax.load(tmp_path / "run", verbose=False)
  assert vit.class_names == tuple("0123456789")
  step = tmp_path / "run" / "checkpoints" / "3"
  x, logits = restore(vit, step / "params", tmp_path)
  assert_same(logits, vit(x)[0])
  like = jax.eval_shape(lambda: vit.params)
  got = ocp.v1.load(step, like, checkpointable_name="params")
  jax.tree.map(np.testing.assert_array_equal, got, vit.params)


def test_orbax_s_new_api_reads_what_we_write(vit, tmp_path):
  folder = tmp_path / "out"
  checkpointer_lib.write_params(str(folder), vit.params, vit.metadata())
  got = ocp.v1.load(folder, jax.eval_shape(lambda: vit.params))
  jax.tree.map(np.testing.assert_array_equal, got, vit.params)


LAYOUTS = {
  "tree": lambda params: params,
  "params": lambda params: {"params": params},
  "stacked": lambda x: stack_blocks(x, ViTConfig),
  "state": lambda params: TrainState.create(
    apply_fn=None, params=params, tx=optax.chain(optax.adam(1e-3))
  ),
}


@pytest.mark.parametrize(
  "writer, layout",
  [
    ("manager", "tree"),
    pytest.param("standard", "stacked", marks=pytest.mark.slow),
    pytest.param("v1", "state", marks=pytest.mark.slow),
    *(
      pytest.param(*row, marks=pytest.mark.nightly)
      for row in (
        ("pytree", "tree"),
        ("v1", "tree"),
        ("standard", "params"),
        ("standard", "state"),
      )
    ),
  ],
)
def test_trees_of_others_are_read(vit, tmp_path, monkeypatch, writer, layout):
  monkeypatch.chdir(tmp_path)
  folder, tree = tmp_path / "theirs", LAYOUTS[layout](vit.params)
  if writer == "manager":
    with ocp.CheckpointManager(folder) as manager:
      manager.save(5, args=ocp.args.StandardSave(tree))
    folder = folder / "5"
  elif writer == "v1":
    ocp.v1.save(folder, tree)
  else:
    kind = {
      "standard": ocp.StandardCheckpointer,
      "pytree": ocp.PyTreeCheckpointer,
    }[writer]
    with kind() as checkpointer:
      checkpointer.save(folder, tree)
  got = vit_jax.load(folder.relative_to(tmp_path), verbose=False)
  jax.tree.map(np.testing.assert_array_equal, got.params, vit.params)
  assert got.config == vit.config and got.image_size == vit.image_size


@pytest.mark.slow
def test_a_model_of_ours_is_one_of_nnx(vit):
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


@pytest.mark.nightly
def test_nnx_trains_them(vit, plain_vit):
  model = nnx.bridge.ToNNX(plain_vit, rngs=nnx.Rngs(0))
  x = images(vit)
  nnx.bridge.lazy_init(model, x)
  nnx.update(model, vit.params)
  optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    def loss(model):
      labels = np.array([0, 1])
      return optax.softmax_cross_entropy_with_integer_labels(
        model(x), labels
      ).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value

  losses = [float(step(model, optimizer)) for _ in range(3)]
  assert losses[2] < losses[1] < losses[0]
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  before, after = (jax.tree.structure(t) for t in (vit.params, params))
  assert before == after  # so that they go back the same way


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
    ("vit_token", {}),
    ("hybrid_r", {}),
    ("bit_v2", {}),
  ],
)
def test_exported_models_need_jax_alone(name, options, tmp_path):
  vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False, **options)
  (tmp_path / "model").write_bytes(vit.export())
  x = images(vit, rows=5)
  np.save(tmp_path / "images.npy", x)
  assert alone(CALL, tmp_path, "model") == "refused\n" * 2
  with np.load(tmp_path / "logits.npz") as file:
    logits = dict(file)
  for key, rows in zip(logits, (1, 2, 5), strict=True):
    expected = np.asarray(vit(x[:rows])[0])
    if "dtype" not in options:
      assert_same(logits[key], expected)
    else:
      # 8 bits of mantissa: what rounds otherwise differs by 2^-8.
      np.testing.assert_allclose(
        logits[key], expected, atol=0.02 * np.abs(expected).max()
      )


@pytest.mark.slow
def test_an_export_states_its_platforms(vit):
  def read(**options):
    return jax.export.deserialize(bytearray(vit.export(**options)))

  assert read().platforms == ("cpu",)
  exported = read(platforms=("cuda", "tpu"))
  assert exported.platforms == ("cuda", "tpu")
  with pytest.raises(ValueError, match="platforms"):
    exported.call(images(vit))
  for wrong in ("gpu", ("cpu", "gpu"), ()):
    with pytest.raises(ValueError, match="platforms"):
      read(platforms=wrong)


COMPARE = """
import numpy as np
x = np.random.default_rng(0).uniform(-1, 1, (64, *vit.image_shape))
x = x.astype(np.float32)
got, expected = jax.jit(model.apply)({"params": params}, x)[0], vit(x)[0]
print(np.abs(got - expected).max() / np.abs(expected).max())
for tree in params, vit.params:
  print(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
"""


@pytest.mark.nightly
def test_int8_by_qwix_as_in_the_docs(tmp_path, monkeypatch):
  pytest.importorskip("qwix")
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
  (code,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.M | re.S)
  change, small, large = map(float, outside(code + COMPARE, tmp_path).split())
  # A weight or an input changes by at most 1/254 of the largest; changes of
  # several layers add up. The most seen was 0.015 of the largest logit.
  assert 0 < change < 0.03
  assert 0.25 < small / large < 0.3  # norms, biases, positions: float32

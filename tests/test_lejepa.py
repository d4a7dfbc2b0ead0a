"""`examples/lejepa.py`: values of the authors' code, and meshes."""

import dataclasses
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
import tiny
from self_supervised import methods

import vit_jax
from vit_jax import collectives, step
from vit_jax.batch import normalise
from vit_jax.config import cli
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

DATA = np.load(several.ROOT / "tests/data/ssl_lejepa.npz")
LOCAL = "decode_inception_crop(8, 5, 30)"


@pytest.fixture(scope="module", autouse=True)
def lejepa():
  path = several.ROOT / "examples/lejepa.py"
  spec = importlib.util.spec_from_file_location("lejepa", path)
  module = importlib.util.module_from_spec(spec)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "lejepa", module)
    spec.loader.exec_module(module)
    yield module


def _on_four_devices(fn, z):
  """Returns loss and gradient of `fn(z, over)`, with rows over devices."""

  def of_device(z, over):
    # As a step adds the sums of the devices.
    share_of_the_sum = lambda z: fn(z, over) * len(z)
    value, grad = jax.value_and_grad(share_of_the_sum)(z)
    return over.sum(value[None])[None], grad

  (value, *_), grad = methods.on_devices(4, of_device, z)
  return value / len(z), grad / len(z)


def _terms(lejepa, directions):
  """Returns (z, over) -> prediction by row, and SIGReg of the whole batch."""
  directions = jnp.asarray(directions, jnp.float32)
  return lambda z, over: lejepa.terms(
    z, directions, over.mean, over.sum(jnp.ones(len(z)))
  )


@pytest.mark.parametrize("name", ["x", "views"])
def test_sigreg_is_that_of_the_authors(lejepa, name):
  views = DATA["x"][None] if name == "x" else DATA["views"]
  z = jnp.asarray(views.swapaxes(0, 1), jnp.float32)
  terms = _terms(lejepa, DATA["directions_raw"])
  value, grad = _on_four_devices(lambda *args: terms(*args)[1], z)
  want = {
    k: DATA[f"sigreg/float64/{name}/{k}"] for k in ("mean", "grad_of_mean")
  }
  # float32 against float64
  np.testing.assert_allclose(value, want["mean"], rtol=3e-6)
  want = want["grad_of_mean"].reshape(views.shape).swapaxes(0, 1)
  scale = np.abs(want).max()
  np.testing.assert_allclose(grad / scale, want / scale, atol=3e-6)


def test_the_loss_is_that_of_the_authors(lejepa, monkeypatch):
  """All crops of their example are global ones."""
  monkeypatch.setattr(lejepa, "GLOBAL", 3)
  z = jnp.asarray(DATA["views"].swapaxes(0, 1), jnp.float32)
  share = lejepa.LeJEPA().share
  assert share == DATA["minimal/lamb"]
  terms = _terms(lejepa, DATA["directions"])

  def loss(z, over):
    prediction, normality = terms(z, over)
    return (1 - share) * prediction.mean() + share * normality

  value, grad = _on_four_devices(loss, z)
  np.testing.assert_allclose(value, DATA["minimal/float64/loss"], rtol=3e-6)
  want = DATA["minimal/float64/grad"].swapaxes(0, 1)
  np.testing.assert_allclose(grad, want, rtol=1e-4, atol=3e-7)


@pytest.fixture
def objective(lejepa):
  sizes = dict(directions=32, hidden=24, width=8, local_crops=3)
  return lejepa.LeJEPA(kind="lejepa:LeJEPA", local_ops=LOCAL, **sizes)


@pytest.mark.nightly
def test_four_devices_give_the_same(objective):
  outcomes = []
  for devices, mesh in ((1, {}), (4, dict(mesh__data=2, mesh__fsdp=2))):
    made = methods.config("mae", model__dropout=0.1, **mesh)
    made = dataclasses.replace(made, objective=objective)
    outcomes.append(methods.Run(made, devices).outcome())
  ((first, *_), *_), _ = outcomes
  assert {"prediction", "sigreg"} < first.keys() and first["sigreg"] > 1
  methods.assert_close(*outcomes)


def test_the_batch_norm_is_over_the_whole_batch_without_broken_rows(
  objective, lejepa
):
  """The loss of numpy: everything but the network computed again."""
  shape = step.RunShape(0, (16, 16), 4)
  learner = objective.make(methods.config("mae").model, shape, {})
  params = methods.params_of(learner.module)
  rng = np.random.default_rng(0)
  batch = {
    "global": rng.integers(0, 256, (4, 2, 16, 16, 3), np.uint8),
    "local": rng.integers(0, 256, (4, 3, 8, 8, 3), np.uint8),
    "mask": np.array([True, True, True, False]),
    "index": np.arange(4),
  }
  key = jax.random.key(3)

  def of_device(params, batch):
    def vectors(crops):
      x = normalise(crops.reshape(-1, *crops.shape[2:]))
      apply = learner.module.apply
      x = apply({"params": params}, x, None, method="vectors")
      return x.reshape(4, crops.shape[1], -1)

    result = learner.loss(params, batch, key, 0, collectives.Over())
    return result, jnp.concatenate(
      [vectors(batch["global"]), vectors(batch["local"])], 1
    )

  (_, count, parts), x = tiny.in_step(of_device)(params, batch)
  assert count == 3
  x = np.asarray(x)[:3]
  own = jax.tree.map(np.asarray, params["lejepa"])
  for i in range(2):
    x = x @ own[f"Dense_{i}"]["kernel"] + own[f"Dense_{i}"]["bias"]
    x = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
    x = np.maximum(x * own[f"scale_{i}"] + own[f"bias_{i}"], 0)
  z = x @ own["Dense_2"]["kernel"] + own["Dense_2"]["bias"]
  want = np.square(z - z[:, :2].mean(1, keepdims=True)).mean()
  prediction, _ = parts["prediction"]
  np.testing.assert_allclose(prediction / 3, want, rtol=1e-5)


@pytest.mark.nightly
def test_a_run_by_import_path(lejepa, monkeypatch, tmp_path):
  """Its checkpoint is that of the network; the projector stays behind."""
  monkeypatch.chdir(several.ROOT / "examples")
  config = cli.parse(
    "train",
    {},
    [
      "--config=lejepa.py",
      "--fake_data",
      *("--config.total_steps=2", "--config.data.batch_size=8"),
      *("--config.model.depth=1", "--config.model.posemb=learn"),
      *("--config.log_steps=1", "--config.optim.warmup_steps=1"),
    ],
  ).config
  state = train_and_evaluate(config, str(tmp_path))
  assert "lejepa" in state.params
  (*_, row) = read_metrics(str(tmp_path))
  assert 0 <= row["knn/20nn"] <= 1
  vit = vit_jax.load(tmp_path, verbose=False)
  assert "lejepa" not in vit.params and vit.image_size == (32, 32)

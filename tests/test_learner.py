"""The contract of the step: targets, teacher, memory, whole-batch losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import sharding, step, step_checks
from vit_jax.batch import normalise
from vit_jax.models import build
from vit_jax.objectives.objective import (
  Average,
  Frozen,
  Learner,
  Objective,
  Targets,
)
from vit_jax.options import option

ONE = jax.devices()[:1]
FOUR = jax.devices()[:4]


def _vectors(module, params, batch, rng=None):
  kwargs = {}
  if rng is not None:
    records = batch["index"]
    kwargs = dict(is_training=True, records=records, rngs={"dropout": rng})
  _, out = module.apply({"params": params}, normalise(batch["image"]), **kwargs)
  x = out["pre_logits"].astype(jnp.float32)
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Contrast(Objective):
  """InfoNCE of a network and its running mean, with a centre in memory."""

  kind: str = "contrast"
  whole_batch: bool = option(False, "whether the keys have a gradient")
  momentum: float = option(0.5, "of the teacher")

  trains_head = False

  def make(self, model, run_shape, models):
    module = build(model, 0)

    def targets(teacher, batch, rng, step, memory, over):
      keys = _vectors(module, teacher, batch)
      centre = over.mean(keys, batch["mask"])
      new = 0.9 * memory["centre"] + 0.1 * centre
      everything = over.gather(keys - memory["centre"][None])
      places = over.rows(len(keys))
      return Targets({"place": places}, {"keys": everything}, {"centre": new})

    def loss(params, batch, rng, step, over=None):
      x = _vectors(module, params, batch, rng)
      if over is None:
        keys, places = batch["shared"]["keys"], batch["targets"]["place"]
      else:
        keys, places = over.gather(x + 0.1), over.rows(len(x))
      log_p = jax.nn.log_softmax(x @ keys.T * (1.0 + step))
      own = jnp.take_along_axis(log_p, places[:, None], 1)[:, 0]
      mask = batch["mask"].astype(jnp.float32)
      seen = jnp.sum(own * 0 + places.astype(jnp.float32))
      return (
        -jnp.sum(own * mask),
        jnp.sum(mask),
        {"place": (seen, jnp.float32(len(x)))},
      )

    if self.whole_batch:
      return Learner(module, loss, whole_batch=True)
    return Learner(
      module,
      loss,
      teacher=Average(lambda step: self.momentum + 0.0 * step),
      targets=targets,
      memory={"centre": np.zeros(32, np.float32)},
    )


class _Parts(tiny.Parts):
  def __init__(self, config, devices, objective, observers=()):
    super().__init__(config, devices)
    self.config = dataclasses.replace(config, objective=objective)
    shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), config.total_steps)
    self.trainer = step.assemble(self.config, shape, self.mesh, observers)
    self.train_step = self.trainer.train_step


def _run(devices, objective=Contrast(), num_steps=3, **changes):
  parts = _Parts(tiny.config(**changes), devices, objective)
  state, metrics = parts.run(num_steps)
  return jax.device_get(state), metrics


@pytest.fixture(scope="module")
def one():
  return _run(ONE)


MESHES = {
  "data": dict(mesh__data=4),
  "fsdp": dict(mesh__fsdp=4),
  "tensor": dict(mesh__tensor=2, mesh__data=2),
  "microbatches": dict(mesh__fsdp=2, mesh__data=2, optim__microbatch=2),
  "scan": dict(mesh__fsdp=4, model__scan=True),
}


@pytest.mark.parametrize("mesh", ["data", "fsdp", "microbatches"])
def test_a_loss_over_the_batch_is_that_of_one_device(mesh, one):
  _close(one, _run(FOUR, **MESHES[mesh]))


@pytest.mark.slow
def test_a_loss_over_the_batch_beside_a_tensor_axis(one):
  _close(one, _run(FOUR, **MESHES["tensor"]))


@pytest.mark.slow
def test_a_loss_over_the_batch_with_blocks_in_a_scan():
  _close(_run(ONE, model__scan=True), _run(FOUR, **MESHES["scan"]))


def _close(one, other):
  (state, metrics), (others_state, others) = one, other
  for a, b in zip(metrics, others, strict=True):
    for key in a:
      # float32, in another order of sums, in three steps
      np.testing.assert_allclose(a[key], b[key], rtol=2e-5, err_msg=key)
  np.testing.assert_allclose(
    state.memory["objective"]["centre"],
    others_state.memory["objective"]["centre"],
    atol=2e-6,
  )


def test_named_sums_have_counts_of_their_own(one):
  _, metrics = one
  assert metrics[0]["place"] == (16 - 1) / 2  # 15 rows count for the loss


def test_the_teacher_is_a_running_mean(one):
  """After each update: half of the old teacher, half of the parameters."""
  parts = _Parts(tiny.config(), ONE, Contrast())
  state, want = parts.state(), None
  for _ in range(3):
    before = jax.device_get(state.averages["teacher"]) if want is None else want
    state, _ = parts.run(1, state)
    want = jax.tree.map(lambda a, b: (a + b) / 2, before, state.params)
  got = state.averages["teacher"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want
  )
  jax.tree.map(np.testing.assert_array_equal, got, one[0].averages["teacher"])


def test_a_skipped_step_keeps_teacher_and_memory():
  parts = _Parts(tiny.config(), ONE, Contrast())
  state, _ = parts.run(2)
  kept = jax.device_get((state.averages, state.memory))
  batch = tiny.batch(2, parts.config)
  nan = jax.tree.map(lambda x: x * np.nan, state.params["embedding"])
  state = state.replace(params={**state.params, "embedding": nan})
  state, metrics = parts.train_step(
    state, sharding.to_global(batch, parts.mesh)
  )
  assert metrics["skipped"] == 1
  jax.tree.map(
    np.testing.assert_array_equal, kept, (state.averages, state.memory)
  )


@pytest.fixture(scope="module")
def whole():
  return _run(ONE, Contrast(whole_batch=True))[1]


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("tensor")])
def test_a_gradient_through_all_rows_is_that_of_one_device(mesh, whole):
  _, metrics = _run(FOUR, Contrast(whole_batch=True), **MESHES[mesh])
  for a, b in zip(whole, metrics, strict=True):
    for key in a:
      np.testing.assert_allclose(a[key], b[key], rtol=2e-5, err_msg=key)


class _Teacher:
  """What `vit_jax.load` returns, as far as an objective needs it."""

  def __init__(self):
    self.config = tiny.config(model__width=16).model
    self.num_classes, self.image_size = tiny.NUM_CLASSES, (16, 16)
    self.model = build(self.config, self.num_classes)
    images = jnp.zeros((1, 16, 16, 3))
    self.params = jax.jit(self.model.init)(jax.random.key(3), images)["params"]


def test_a_frozen_teacher_is_an_argument_of_the_step():
  teacher = _Teacher()
  config = tiny.config(mesh__fsdp=4)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  module = build(config.model, tiny.NUM_CLASSES)

  def targets(params, batch, rng, step, memory, over):
    _, out = teacher.model.apply({"params": params}, normalise(batch["image"]))
    return Targets({"norm": jnp.square(out["pre_logits"]).sum(-1)})

  def loss(params, batch, rng, step):
    total = jnp.sum(batch["targets"]["norm"] * batch["mask"])
    logits, _ = module.apply({"params": params}, normalise(batch["image"]))
    total += jnp.sum(logits * batch["mask"][:, None])
    return total, jnp.sum(batch["mask"], dtype=jnp.float32), {}

  learner = Learner(module, loss, Frozen(teacher), targets)
  parts = tiny.Parts(config, FOUR)
  trainer = step.assemble(config, shape, parts.mesh, (), learner)
  state = trainer.init_state()
  like = trainer.state.fixed["teacher"]
  sharding_ = like["embedding"]["kernel"].sharding
  assert sharding_.spec != jax.sharding.PartitionSpec()  # a model of its family
  placed = jax.tree.map(
    lambda x, s: jax.device_put(np.array(x), s.sharding),
    teacher.params,
    like,
  )
  state = state.replace(fixed={"teacher": placed})
  batch = tiny.batch(0, config)
  state, metrics = trainer.train_step(
    state, sharding.to_global(batch, parts.mesh)
  )
  images = jnp.asarray(normalise(batch["image"]))
  _, out = teacher.model.apply({"params": teacher.params}, images)
  norms = np.square(out["pre_logits"]).sum(-1)
  want = norms[batch["mask"]].mean()
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
  jax.tree.map(
    np.testing.assert_array_equal, state.fixed["teacher"], teacher.params
  )


class Both(Contrast):
  """A frozen teacher beside a running mean, which is evaluated."""

  SHARDING = ((r"head/bias", ("fsdp",)),)

  def make(self, model, run_shape, models):
    learner, teacher = super().make(model, run_shape, models), _Teacher()

    def targets(params, batch, *args):
      mean, frozen = params
      made = learner.targets(mean, batch, *args)
      _, out = teacher.model.apply(
        {"params": frozen}, normalise(batch["image"])
      )
      return made._replace(rows=made.rows | {"place": out["logits"].sum(-1)})

    def loss(params, batch, rng, step):
      _, out = learner.module.apply(
        {"params": params}, normalise(batch["image"])
      )
      mask = batch["mask"].astype(jnp.float32)
      total = jnp.sum(jnp.square(out["logits"] - 1.0).sum(-1) * mask)
      seen = jnp.sum(batch["targets"]["place"] * mask)
      return total, jnp.sum(mask), {"frozen": (seen, jnp.sum(mask))}

    average = Average(self.momentum, is_published=True)
    return dataclasses.replace(
      learner,
      module=build(model, run_shape.num_classes),
      teacher=(average, Frozen(teacher)),
      targets=targets,
      loss=loss,
    )


def test_a_running_mean_beside_a_frozen_teacher(tmp_path):
  """The mean is what is evaluated and published; both reach the targets."""
  runs = {}
  for devices, mesh in ((ONE, {}), (FOUR, dict(mesh__fsdp=4))):
    # Adam would divide gradients that are only rounding by their own size.
    config, teacher = tiny.config(optim__name="sgd", **mesh), _Teacher()
    parts = _Parts(config, devices, Both())
    like = parts.trainer.state
    if mesh:  # by a rule of the objective
      spec = like.averages["ema"]["head"]["bias"].sharding.spec
      assert spec == like.params["head"]["bias"].sharding.spec != ()
    state = parts.state().with_fixed("teacher", teacher.params, like)
    first = jax.device_get(state.params)
    runs[len(devices)] = parts.run(2, state)
  (state, metrics), (others, others_metrics) = runs.values()
  for a, b in zip(metrics, others_metrics, strict=True):
    for key in a:
      np.testing.assert_allclose(a[key], b[key], rtol=2e-5, err_msg=key)
  batch = tiny.batch(0, parts.config)
  _, out = teacher.model.apply(
    {"params": teacher.params}, jnp.asarray(normalise(batch["image"]))
  )
  want = out["logits"].sum(-1)[batch["mask"]].mean()
  np.testing.assert_allclose(metrics[0]["frozen"], want, rtol=1e-5)
  assert state.eval_params is state.averages["ema"]
  assert not np.array_equal(first["cls"], state.params["cls"])
  _close_trees(state.averages["ema"], others.averages["ema"])


def _close_trees(one, other):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    jax.device_get(one),
    jax.device_get(other),
  )


def test_a_published_teacher_takes_the_place_of_the_average():
  config = dataclasses.replace(
    tiny.config(optim__ema_decay=0.9), objective=Both()
  )
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = config.objective.make(config.model, shape, {})
  (error,) = step_checks.errors(config, shape, learner, ())
  assert "config.optim.ema_decay" in error


@dataclasses.dataclass(frozen=True)
class Distill(Objective):
  """The vectors of a frozen model, `vit_jax.load(path)`."""

  kind: str = "test_learner:Distill"
  path: str = option("", "weights of the teacher")

  trains_head = False
  own = "distill/"

  def models(self):
    return {"teacher": self.path}

  def make_errors(self, model, run_shape, models):
    if models["teacher"].image_size != run_shape.image_size:
      yield "config.data.ops: got other images than the teacher's."

  def make(self, model, run_shape, models):
    given = models["teacher"]
    module = build(model, 0)

    def targets(params, batch, rng, step, memory, over):
      images = normalise(batch["image"])
      _, out = given.model.apply({"params": params}, images)
      return Targets(out["pre_logits"].mean(-1))

    def loss(params, batch, rng, step):
      _, out = module.apply({"params": params}, normalise(batch["image"]))
      difference = out["pre_logits"].mean(-1) - batch["targets"]
      total = jnp.sum(jnp.square(difference) * batch["mask"])
      return total, jnp.sum(batch["mask"], dtype=jnp.float32), {}

    return Learner(module, loss, Frozen(given), targets)


def test_a_run_with_a_frozen_teacher_resumes(tmp_path, monkeypatch):
  """Its weights are read again, and must be the same."""
  from vit_jax.checkpointing.checkpointer import load_metadata, write_params
  from vit_jax.config import ConfigError, to_dict
  from vit_jax.train import train_and_evaluate

  teacher = _Teacher()
  config = tiny.config(total_steps=4, checkpoint__every_steps=2, log_steps=1)
  about = dict(
    config={**to_dict(config), "model": dataclasses.asdict(teacher.config)},
    image_size=[16, 16],
    grid=[2, 2],
    num_classes=tiny.NUM_CLASSES,
    has_cls_row=True,
  )
  path = str(tmp_path / "teacher")
  write_params(path, teacher.params, about)
  config = dataclasses.replace(config, objective=Distill(path=path))
  whole = train_and_evaluate(config, str(tmp_path / "a"), tiny.Data())
  assert load_metadata(str(tmp_path / "a"))["models"]["teacher"]["path"] == path

  from vit_jax.callbacks import Callback, Stop

  class Ends(Callback):
    def check_stop(self, step):
      if step == 2:
        raise Stop("a test")

  with pytest.raises(Stop):
    train_and_evaluate(
      config, str(tmp_path / "b"), tiny.Data(), callbacks=[Ends()]
    )
  state = train_and_evaluate(config, str(tmp_path / "b"), tiny.Data())
  jax.tree.map(np.testing.assert_array_equal, state, whole)
  assert not [f for f in (tmp_path / "b").rglob("*teacher*")]

  teacher.params["embedding"]["bias"] += 1.0
  write_params(str(tmp_path / "other"), teacher.params, about)
  (tmp_path / "teacher").rename(tmp_path / "gone")
  (tmp_path / "other").rename(tmp_path / "teacher")
  with pytest.raises(ConfigError, match="digest"):
    train_and_evaluate(config, str(tmp_path / "b"), tiny.Data())

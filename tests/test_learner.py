"""The contract of the step: targets, teachers, memory, whole-batch losses."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from steps import MESH, ONE, placed

from vit_jax import step, step_checks
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


def _vectors(out):
  x = out["pre_logits"].astype(jnp.float32)
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Teacher:
  """What `vit_jax.load` returns, as far as an objective needs it."""

  def __init__(self):
    self.config = tiny.config(model__width=16).model
    self.num_classes, self.image_size = tiny.NUM_CLASSES, (16, 16)
    self.model = build(self.config, self.num_classes)
    images, rng = jnp.zeros((1, 16, 16, 3)), np.random.default_rng(3)
    shapes = jax.eval_shape(self.model.init, jax.random.key(0), images)
    draw = lambda x: rng.normal(0, 0.2, x.shape).astype("f")
    self.params = jax.tree.map(draw, shapes["params"])

  def logits(self, params, batch):
    images = normalise(batch["image"])
    return self.model.apply({"params": params}, images)[0]


TEACHER = Teacher()


@dataclasses.dataclass(frozen=True)
class Contrast(Objective):
  """InfoNCE of a network and its running mean, with a centre in memory.

  A frozen teacher's logits are the targets of the head.
  """

  kind: str = "contrast"
  whole_batch: bool = option(False, "the keys have a gradient; no teachers")
  momentum: float = option(0.75, "of the running mean")

  SHARDING = ((r"head/bias", ("fsdp",)),)

  def make(self, model, run_shape, models):
    module = build(model, run_shape.num_classes)

    def apply(params, batch, rng=None):
      kwargs = {}
      if rng is not None:
        records = batch["index"]
        kwargs = dict(is_training=True, records=records, rngs={"dropout": rng})
      return module.apply(
        {"params": params}, normalise(batch["image"]), **kwargs
      )

    def targets(params, batch, rng, step, memory, over):
      mean, frozen = params
      keys = _vectors(apply(mean, batch)[1])
      centre = over.mean(keys, batch["mask"])
      new = 0.9 * memory["centre"] + 0.1 * centre
      rows = {
        "place": over.rows(len(keys)),
        "logits": TEACHER.logits(frozen, batch),
      }
      shared = {"keys": over.gather(keys - memory["centre"][None])}
      return Targets(rows, shared, {"centre": new})

    def loss(params, batch, rng, step, over=None):
      logits, out = apply(params, batch, rng)
      x, mask = _vectors(out), batch["mask"].astype(jnp.float32)
      error = seen = jnp.zeros(len(x))
      if over is None:
        keys, places = batch["shared"]["keys"], batch["targets"]["place"]
        seen = batch["targets"]["logits"].sum(-1)
        error = jnp.square(logits - batch["targets"]["logits"]).sum(-1)
      else:
        keys, places = over.gather(x + 0.1), over.rows(len(x))
      log_p = jax.nn.log_softmax(x @ keys.T * (1.0 + step))
      own = jnp.take_along_axis(log_p, places[:, None], 1)[:, 0]
      # Depends on x, else it would be counted on one device alone.
      number = jnp.sum(own * 0 + places.astype(jnp.float32))
      return (
        jnp.sum((error - own) * mask),
        jnp.sum(mask),
        {
          "place": (number, jnp.float32(len(x))),
          "frozen": (jnp.sum(seen * mask), jnp.sum(mask)),
        },
      )

    if self.whole_batch:
      return Learner(module, loss, whole_batch=True)
    mean = Average(lambda step: self.momentum + 0.0 * step, is_published=True)
    return Learner(
      module,
      loss,
      teacher=(mean, Frozen(TEACHER)),
      targets=targets,
      memory={"centre": np.zeros(32, np.float32)},
    )


class Parts(tiny.Parts):
  def __init__(self, objective, devices=None, **changes):
    # Adam would divide gradients that are only rounding by their own size.
    config = tiny.config(optim__name="sgd", optim__lr=0.1, **changes)
    super().__init__(config, devices)
    self.config = dataclasses.replace(config, objective=objective)
    shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), config.total_steps)
    self.trainer = step.assemble(self.config, shape, self.mesh)
    self.shapes, self.train_step = self.trainer.state, self.trainer.train_step

  def placed(self, params):
    state = placed(self, params)
    if not state.fixed:
      return state
    return state.with_fixed("teacher", TEACHER.params, self.shapes)


class Run(NamedTuple):
  parts: Parts
  params: list[dict]  # before each step, and at the end
  state: Any
  metrics: list[dict[str, float]]


def run(objective, devices=None, params=None, **changes):
  """Three steps."""
  parts = Parts(objective, devices, **changes)
  state, history, metrics = parts.placed(params), [], []
  for _ in range(3):
    history.append(jax.device_get(state.params))
    state, values = parts.run(1, state)
    metrics += values
  history.append(jax.device_get(state.params))
  return Run(parts, history, jax.device_get(state), metrics)


@pytest.fixture(scope="module")
def one():
  return run(Contrast(), ONE)


def assert_close(one, other):
  for a, b in zip(one.metrics, other.metrics, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      # float32, in another order of sums, in three steps
      np.testing.assert_allclose(a[key], b[key], rtol=2e-5, err_msg=key)


def on_a_mesh(one, **changes):
  other = run(Contrast(), params=one.params[0], **changes)
  assert_close(one, other)
  want, got = (
    (x.state.memory, x.state.eval_params["head"]) for x in (one, other)
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6)
  jax.tree.map(close, want, got)
  return other.parts.shapes


@pytest.mark.slow
def test_a_mesh_microbatches_and_a_scan_have_the_losses_of_one_device(one):
  shapes = on_a_mesh(one, **MESH, optim__microbatch=2, model__scan=True)
  teacher = shapes.fixed["teacher"]  # split as a model of its own family
  assert teacher["embedding"]["kernel"].sharding.spec != jax.P()
  for params in (shapes.params, shapes.averages["ema"]):
    assert params["head"]["bias"].sharding.spec == jax.P("fsdp")


@pytest.mark.nightly
@pytest.mark.parametrize(
  "mesh", [dict(mesh__data=4, mesh__tensor=2), dict(mesh__fsdp=8)]
)
def test_any_mesh_has_the_losses_of_one_device(one, mesh):
  on_a_mesh(one, **mesh)


def test_named_sums_have_counts_of_their_own(one):
  assert one.metrics[0]["place"] == (16 - 1) / 2  # 15 rows count for the loss


def test_the_teacher_is_a_running_mean(one):
  """After each update: three quarters of the old one, and the parameters."""
  want, *later = one.params
  for params in later:
    want = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, want, params)
  got = one.state.averages["ema"]
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
  jax.tree.map(close, got, want)
  assert np.any(one.params[0]["cls"] != one.params[-1]["cls"])
  assert one.state.eval_params is got


def test_a_frozen_teacher_is_an_argument_of_the_step(one):
  batch = tiny.batch(0, one.parts.config)
  images = {"image": jnp.asarray(batch["image"])}
  logits = jax.jit(TEACHER.logits)(TEACHER.params, images)
  want = logits.sum(-1)[batch["mask"]].mean()
  np.testing.assert_allclose(one.metrics[0]["frozen"], want, rtol=1e-5)
  fixed = one.state.fixed["teacher"]
  jax.tree.map(np.testing.assert_array_equal, fixed, TEACHER.params)


def test_a_skipped_step_keeps_teacher_and_memory(one):
  parts = one.parts
  state, _ = parts.run(1, parts.placed(one.params[0]))
  kept = jax.device_get((state.averages, state.memory))
  nan = jax.tree.map(lambda x: x * np.nan, state.params["embedding"])
  state = state.replace(params={**state.params, "embedding": nan})
  state, (metrics,) = parts.run(1, state)
  assert metrics["skipped"] == 1
  after = (state.averages, state.memory)
  jax.tree.map(np.testing.assert_array_equal, kept, after)


@pytest.mark.slow
def test_a_gradient_through_all_rows_is_that_of_one_device():
  whole = run(Contrast(whole_batch=True), ONE)
  mesh = run(Contrast(whole_batch=True), params=whole.params[0], **MESH)
  assert_close(whole, mesh)


@pytest.mark.parametrize(
  "objective, changes, option",
  [
    (Contrast(), dict(optim__ema_decay=0.9), "config.optim.ema_decay"),
    (
      Contrast(whole_batch=True),
      dict(optim__microbatch=8),
      "config.optim.microbatch",
    ),
  ],
)
def test_options_that_the_contract_excludes(objective, changes, option):
  """A published teacher is an average; microbatches have no whole batch."""
  config = dataclasses.replace(tiny.config(**changes), objective=objective)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = config.objective.make(config.model, shape, {})
  (error,) = step_checks.errors(config, shape, learner, ())
  assert option in error


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


@pytest.mark.nightly
def test_a_run_with_a_frozen_teacher_resumes(tmp_path):
  """Its weights are read again, and must be the same."""
  from vit_jax.checkpointing.checkpointer import load_metadata, write_params
  from vit_jax.config import ConfigError, to_dict
  from vit_jax.train import train_and_evaluate

  teacher = Teacher()
  config = tiny.config(
    model__depth=1, total_steps=4, checkpoint__every_steps=2, log_steps=1
  )
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

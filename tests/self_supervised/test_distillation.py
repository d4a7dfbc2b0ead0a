"""Distillation: each loss against numpy, the frozen teacher, runs, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
import tiny
from methods import teacher as teacher_of

import vit_jax
from vit_jax import run_checks, sharding
from vit_jax.batch import View, normalise
from vit_jax.callbacks import Callback, Stop
from vit_jax.checkpointing import resume_rules
from vit_jax.checkpointing.checkpointer import load_metadata
from vit_jax.config import ConfigError, checks, to_dict
from vit_jax.models.resample import METHODS
from vit_jax.objectives import mixing
from vit_jax.self_supervised.distillation import Distillation, frozen
from vit_jax.step import RunShape
from vit_jax.tools.planning import planner
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

SLOW = pytest.mark.slow
NAMES = tuple(f"class {i}" for i in range(tiny.NUM_CLASSES))
RNG = jax.random.key(7)
LOGITS = Distillation(teacher="x")
SOFT = Distillation(
  teacher="x", loss="soft", label_smoothing=0.1, alpha=0.1, temperature=3.0
)
HARD = Distillation(teacher="x", loss="hard", label_smoothing=0.1)
FEATURES = Distillation(teacher="x", loss="features")


def config(objective=None, **changes):
  made = methods.config("distillation", **changes)
  return dataclasses.replace(made, objective=objective or made.objective)


# The losses.


def values(objectives, teacher, **changes):
  """Computes losses of one batch, and the outputs that they are of.

  Returns:
    metrics: Name of an objective -> name -> the mean of each sum.
    ours, theirs: Name of an objective -> (logits, intermediates) of student and
      teacher, for the images as it mixes them.
    params: Parameters of the student.
    batch: The batch.
  """
  made = config(next(iter(objectives.values())), **changes)
  batch, shape = methods.batch(0, made), RunShape(10, (16, 16), 4)
  learners = {
    k: v.make(made.model, shape, {"teacher": teacher})
    for k, v in objectives.items()
  }
  first = next(iter(learners.values()))
  module, fixed = first.module, first.frozen.model.params
  student = methods.params_of(module)
  seen = {k: jnp.asarray(mixed(v, batch)[0]) for k, v in objectives.items()}
  own = batch.get("teacher")
  seen_by_teacher = seen
  if own is not None:
    seen_by_teacher = dict.fromkeys(seen, jnp.asarray(normalise(own)))

  @jax.jit
  def computed(params, fixed, theirs, batch):
    metrics = {}
    for name, objective in objectives.items():
      rows, learner = objective.paired(batch), learners[name]
      wanted = learner.targets(fixed, rows, RNG, 0, None, None).rows
      rows = rows | {"targets": wanted}
      total, count, named = learner.loss(params, rows, RNG, 0)
      named = {"loss": (total, count), **named}
      metrics[name] = {k: a / b for k, (a, b) in named.items()}
    outputs = (
      {k: model.apply({"params": p}, x) for k, x in views.items()}
      for model, p, views in (
        (module, params, seen),
        (teacher.model, theirs, seen_by_teacher),
      )
    )
    return metrics, *outputs

  made = computed(student, fixed, teacher.params, batch)
  made = jax.tree.map(lambda x: np.asarray(x, np.float64), made)
  return *made, student, batch


def mixed(objective, batch):
  """Returns pixels and targets of labels as `objectives.mixing` makes them."""
  one_hot = np.eye(tiny.NUM_CLASSES)[batch["label"]]
  examples = normalise(batch["image"]), one_hot
  if not objective.mixup:
    return examples
  others = [np.roll(x, 1, 0) for x in examples]
  images, labels = mixing.mix(
    *(*examples, others, np.roll(batch["mask"], 1)),
    *(RNG, objective.mixup, objective.cutmix),
  )
  assert np.abs(images - examples[0]).max() > 0.1
  return images, np.asarray(labels)


def log_softmax(x):
  return np.log(methods.softmax(x))


def kl(teacher, student, temperature):
  p, q = log_softmax(teacher / temperature), log_softmax(student / temperature)
  return temperature**2 * (np.exp(p) * (p - q)).sum(-1)


def terms_of(objective, for_labels, for_teacher, y, labels):
  """Returns the terms of `SOFT` or `HARD`, row by row.

  Args:
    objective: One of the two.
    for_labels: Logits that learn the labels.
    for_teacher: Logits that learn the teacher's.
    y: The teacher's logits.
    labels: One-hot labels, or mixed ones.
  """
  labels = -((0.9 * labels + 0.01) * log_softmax(for_labels)).sum(-1)
  if objective.loss == "soft":
    soft = kl(y, for_teacher, 3.0)
    return dict(labels=labels, teacher=soft, loss=0.9 * labels + 0.1 * soft)
  rows = np.arange(len(y)), y.argmax(-1)
  hard = -log_softmax(for_teacher)[rows]
  return dict(labels=labels, teacher=hard, loss=(labels + hard) / 2)


def assert_terms(metrics, batch, **terms):
  """Compares means over the rows that count."""
  for name, rows in terms.items():
    mean = rows[batch["mask"]].mean()
    np.testing.assert_allclose(metrics[name], mean, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("token", [False, pytest.param(True, marks=SLOW)])
def test_losses_of_logits(token):
  """Of mixed images for "soft", which student and teacher see alike.

  With a distillation token, labels are for the class token, the teacher for the
  other; otherwise both are for the same logits.
  """
  objectives = {
    "soft": dataclasses.replace(SOFT, token=token, mixup=1.0),
    "hard": dataclasses.replace(HARD, token=token),
  }
  distilled = dict(model__name="modern", model__distilled=True)
  changes = distilled if token else {}
  made = values(objectives, teacher_of(), **changes)
  metrics, ours, theirs, params, batch = made
  for name, objective in objectives.items():
    (logits, out), (y, _) = ours[name], theirs[name]
    first = second = logits
    if token:
      first, second = (
        out["encoded"][:, i] @ params[k]["kernel"] + params[k]["bias"]
        for i, k in enumerate(("head", "head_dist"))
      )
      np.testing.assert_allclose((first + second) / 2, logits, atol=1e-5)
    labels = mixed(objective, batch)[1]
    terms = terms_of(objective, first, second, y, labels)
    terms["agreement"] = y.argmax(-1) == second.argmax(-1)
    assert_terms(metrics[name], batch, **terms)


def distance(a, b, kind):
  if kind == "cosine":
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return 1 - (a * b).sum(-1) / norms
  d = np.abs(a - b)
  return np.where(d < 1, d**2 / 2, d - 0.5).mean(-1)


@pytest.mark.parametrize(
  "grid, patch, ops",
  [
    (4, 4, None),
    pytest.param(3, 8, "decode|resize(24)", marks=SLOW),
  ],
  ids=["smaller patches", "more pixels"],
)
def test_losses_of_features(grid, patch, ops):
  """The teacher's patches are resampled to the 2 x 2 of the student."""
  objectives = {
    k: dataclasses.replace(FEATURES, distance=k, teacher_ops=ops)
    for k in ("cosine", "smooth_l1")
  }
  if ops:  # the same crop at another size
    one = objectives["cosine"]
    assert one.views("decode")["teacher"] == View(ops, like="image")
    assert one.models_size((16, 16)) == (24, 24)
  teacher = teacher_of(0, grid * patch, model__variant=f"Ti/{patch}")
  metrics, ours, theirs, params, batch = values(objectives, teacher)
  (_, ours), (_, theirs) = ours["cosine"], theirs["cosine"]
  to = METHODS["bilinear"](grid, 2)
  wanted = theirs["encoded"][:, 1:].reshape(-1, grid, grid, 16)
  wanted = np.einsum("yh,xw,bhwd->byxd", to, to, wanted).reshape(-1, 4, 16)
  own = params["distillation"]

  def mapped(x, name):
    return x @ own[name]["kernel"] + own[name]["bias"]

  for kind in objectives:
    vector = mapped(ours["encoded"][:, 0], "vector")
    patches = mapped(ours["encoded"][:, 1:], "patches")
    vector = distance(vector, theirs["encoded"][:, 0], kind)
    patches = distance(patches, wanted, kind).mean(-1)
    terms = dict(vector=vector, patches=patches, loss=vector + patches)
    assert_terms(metrics[kind], batch, **terms)


def test_columns_are_those_of_the_names():
  """A teacher with more classes in another order."""
  order = np.random.default_rng(0).permutation(tiny.NUM_CLASSES + 2)
  names = (*NAMES, "one more", "another")
  teacher = teacher_of(len(names), names=tuple(names[i] for i in order))
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4, class_names=NAMES)
  config, models = tiny.config(), {"teacher": teacher}
  assert not [*LOGITS.make_errors(config.model, shape, models)]
  learner = LOGITS.make(config.model, shape, models)
  batch = tiny.batch(0, config)
  targets = lambda p, b: learner.targets(p, b, RNG, 0, None, None).rows
  got = jax.jit(targets)(learner.frozen.model.params, batch)
  images = normalise(batch["image"])
  logits, _ = jax.jit(teacher.model.apply)({"params": teacher.params}, images)
  columns = np.argsort(order)[: len(NAMES)]
  np.testing.assert_allclose(got, logits[:, columns], rtol=1e-4, atol=1e-5)


# The teacher.


def test_the_teacher_does_not_move_and_is_in_no_optimizer():
  """The student's own copy as teacher sees the same mixed pixels."""
  teacher = teacher_of(model__width=32)  # drawn as the student
  made = config(Distillation(teacher="x", mixup=1.0))
  run = methods.Run(made, 1, {"teacher": teacher})
  state, (metrics,) = run.steps(1)
  assert abs(metrics["loss"]) < 1e-6 and metrics["agreement"] == 1
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.ndim)
  assert size(state.opt_state) == size(state.params)  # a momentum
  other = jax.tree.map(lambda x: 1.5 * x, run.learner.frozen.model.params)
  start = run.start().with_fixed("teacher", other, run.trainer.state)
  state, (metrics, _) = run.steps(2, start)
  assert metrics["loss"] > 0.1
  jax.tree.map(np.testing.assert_array_equal, state.fixed["teacher"], other)


@pytest.mark.slow
def test_kernels_in_bfloat16_change_no_result():
  """The step would round the same kernels."""
  teacher, images = teacher_of(), methods.batch(0, config())["image"]
  half, whole = (frozen(teacher, dtype) for dtype in ("bfloat16", "float32"))
  apply = jax.jit(half.model.apply)
  np.testing.assert_array_equal(
    *(apply({"params": x.params}, normalise(images))[0] for x in (half, whole))
  )


def test_flops_are_those_of_both():
  teacher = teacher_of()
  model, shape = tiny.config().model, RunShape(10, (16, 16), 4)
  of_teacher = 2 * teacher.config.forward_macs((16, 16), 10)
  maps = 6 * 32 * 16 * (1 + 4)
  for objective, classes, own in ((LOGITS, 10, 0), (FEATURES, 0, maps)):
    learner = objective.make(model, shape, {"teacher": teacher})
    want = model.train_flops((16, 16), classes) + own + of_teacher
    assert learner.flops(model, shape) == want


# Runs.


def write_teacher(path, teacher):
  size = teacher.image_size[0]
  made = tiny.config(data__ops=f"decode|resize({size})")
  made = dataclasses.replace(made, model=teacher.config)
  return methods.write(path, made, teacher.params, teacher.num_classes)


def test_only_the_address_of_the_teacher_may_change():
  old = Distillation(teacher="/a/teacher", mixup=0.8)
  new = dataclasses.replace(old, teacher="/b/teacher", mixup=0.7)
  changes = resume_rules.differences(to_dict(config(old)), config(new))
  found = {c.key: c.rule.makes_another_run for c in changes}
  assert found == {"objective.teacher": False, "objective.mixup": True}


class Ends(Callback):
  def check_stop(self, step):
    if step == 2:
      raise Stop("a test")


@pytest.mark.nightly
def test_a_run_goes_on_with_a_teacher_that_was_moved(tmp_path):
  """The saved run is the student alone; a changed teacher is refused."""
  teacher = teacher_of()
  config = tiny.config(total_steps=4, checkpoint__every_steps=2, log_steps=1)
  make = lambda path: dataclasses.replace(
    config, objective=Distillation(teacher=path, loss="hard", mixup=0.8)
  )
  first, moved = str(tmp_path / "teacher"), str(tmp_path / "moved")
  write_teacher(first, teacher)
  whole = train_and_evaluate(make(first), str(tmp_path / "a"), tiny.Data())
  other = str(tmp_path / "b")
  with pytest.raises(Stop):
    train_and_evaluate(make(first), other, tiny.Data(), callbacks=[Ends()])
  (tmp_path / "teacher").rename(moved)
  state = train_and_evaluate(make(moved), other, tiny.Data())
  jax.tree.map(np.testing.assert_array_equal, state, whole)
  assert load_metadata(other)["models"]["teacher"]["path"] == moved
  assert not [f for f in (tmp_path / "b").rglob("*teacher*")]
  vit = vit_jax.load(other, verbose=False)
  assert vit.num_classes == tiny.NUM_CLASSES and vit.loss == "softmax"
  jax.tree.map(np.testing.assert_array_equal, vit.params, whole.params)
  teacher.params["embedding"]["bias"] += 1.0
  changed = write_teacher(tmp_path / "changed", teacher)
  with pytest.raises(ConfigError, match="digest"):
    train_and_evaluate(make(changed), other, tiny.Data())


@pytest.mark.nightly
def test_a_run_with_pixels_of_its_own_for_the_teacher(tmp_path):
  """Its positions are resized, too; the student leaves its maps behind."""
  path = write_teacher(tmp_path / "teacher", teacher_of(0))
  ops = "decode|resize(24)"
  objective = dataclasses.replace(FEATURES, teacher=path, teacher_ops=ops)
  short = dict(total_steps=1, log_steps=1, data__dataset="digits")
  train_and_evaluate(config(objective, **short), str(tmp_path / "a"))
  (row,) = (r for r in read_metrics(str(tmp_path / "a")) if "train/loss" in r)
  assert 0 < row["train/vector"] < 2 and 0 < row["train/patches"] < 2
  vit = vit_jax.load(tmp_path / "a", verbose=False)
  assert vit.num_classes == 0 and len(vit.report.ignored) == 4


# What does not fit.


def test_options_that_do_not_fit():
  of_teacher = dict(teacher="x", teacher_ops="decode|resize(8)")
  for options, names in (
    (
      dict(loss="features", alpha=0.1, token=True),
      ("alpha", "teacher", "token"),
    ),
    (dict(cutmix=1.0, **of_teacher), ("cutmix",)),
  ):
    errors = [*Distillation(**options).errors()]
    assert len(errors) == len(names)
    assert all(name in "".join(errors) for name in names)


@pytest.mark.parametrize(
  "objective, teacher, changes, word",
  [
    (LOGITS, dict(num_classes=0), {}, "head"),
    (LOGITS, dict(num_classes=7), {}, "7 classes"),
    (LOGITS, dict(names=tuple("abcdefghij")), {}, "(a, b"),
    (LOGITS, dict(model__channels=1), {}, "1 channels"),
    (FEATURES, tiny.RESNET, {}, "patch tokens"),
    (FEATURES, {}, tiny.RESNET, "Transformer"),
    (dataclasses.replace(HARD, token=True), {}, {}, "model.distilled: got"),
  ],
)
def test_teachers_and_students_that_do_not_fit(
  objective, teacher, changes, word
):
  made = dict(num_classes=10, names=None) | teacher
  model = {k: v for k, v in made.items() if k.startswith("model__")}
  model = tiny.config(**({"model__width": 16} | model)).model
  given = methods.Named(model, {}, made["num_classes"], (16, 16), made["names"])
  student = config(objective, **{"model__depth": None} | changes)
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4, class_names=NAMES)
  errors = checks.errors(student) or [
    *objective.make_errors(student.model, shape, {"teacher": given})
  ]
  assert len(errors) == 1 and word in errors[0]


def test_a_size_that_the_teachers_patch_does_not_divide(tmp_path):
  """Before anything is compiled."""
  teacher = teacher_of(side=12, model__variant="Ti/6")
  path = write_teacher(tmp_path / "teacher", teacher)
  with pytest.raises(ConfigError, match="side 6"):
    run_checks.setup(config(Distillation(teacher=path)), None, tiny.Data())


@pytest.mark.slow
def test_a_published_teacher_is_planned_without_its_file():
  """Its table has the shapes."""

  def lower(loss):
    objective = Distillation(
      teacher="hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m",
      loss=loss,
      teacher_dtype="bfloat16",
    )
    made = config(objective, num_classes=10, mesh__fsdp=8)
    return planner.lower(made, sharding.make_mesh(made.mesh))

  _, (state, _) = lower("features")
  block = state.fixed["teacher"]["Transformer"]["encoderblock"]
  kernel = block["MlpBlock_0"]["Dense_0"]["kernel"]
  assert kernel.shape == (12, 384, 1536) and kernel.dtype == jnp.bfloat16
  split = kernel.sharding.shard_shape(kernel.shape)
  assert split == (12, 384 // 8, 1536)
  with pytest.raises(ConfigError, match="without a head"):
    lower("logits")

"""Distillation: each loss against numpy, the frozen teacher, runs, errors."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import vit_jax
from vit_jax import run_checks, sharding, step
from vit_jax.batch import View, normalise
from vit_jax.callbacks import Callback, Stop
from vit_jax.checkpointing import resume_rules
from vit_jax.checkpointing.checkpointer import load_metadata, write_params
from vit_jax.config import ConfigError, checks, to_dict
from vit_jax.models.resample import METHODS
from vit_jax.models.stacking import stack_blocks
from vit_jax.objectives import mixing
from vit_jax.self_supervised.distillation import Distillation, Teacher, frozen
from vit_jax.step import RunShape
from vit_jax.tools.planning import planner
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

ONE = jax.devices()[:1]
NAMES = tuple(f"class {i}" for i in range(tiny.NUM_CLASSES))
DISTILLED = dict(model__name="modern", model__distilled=True)
SGD = dict(optim__name="sgd", optim__lr=0.1)  # Adam divides by rounding


@dataclasses.dataclass(frozen=True)
class Named(Teacher):
  class_names: tuple[str, ...] | None = None


def teacher_of(num_classes=tiny.NUM_CLASSES, side=16, names=None, **changes):
  """A random model, of another width than the student."""
  changes = {"model__width": 16, "model__depth": 1} | changes
  model = tiny.config(**changes).model
  made = Named(model, {}, num_classes, (side, side), names)
  images = jnp.zeros((1, side, side, 3))
  params = jax.jit(made.model.init)(jax.random.key(3), images)["params"]
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(4), len(leaves))
  leaves = [  # also of what begins as zeros
    np.array(x + 0.2 * jax.random.normal(k, x.shape))
    for x, k in zip(leaves, keys, strict=True)
  ]
  return dataclasses.replace(made, params=jax.tree.unflatten(tree, leaves))


class Parts:
  """A step of distillation, with the random batches of `tiny.batch`."""

  def __init__(self, objective, teacher, devices=ONE, **changes):
    self.config = dataclasses.replace(
      tiny.config(**changes), objective=objective
    )
    self.mesh = sharding.make_mesh(self.config.mesh, devices)
    shape = RunShape(tiny.NUM_CLASSES, (16, 16), self.config.total_steps)
    models = {"teacher": teacher}
    self.learner = objective.make(self.config.model, shape, models)
    self.trainer = step.assemble(
      self.config, shape, self.mesh, (), self.learner
    )
    self.teacher = teacher

  def state(self):
    """A state whose head is not zero, equal on any mesh."""
    state = self.trainer.init_state()
    params = jax.tree.map(
      lambda x: x + 0.1 * np.cos(np.arange(x.size)).reshape(x.shape),
      jax.device_get(state.params),
    )
    state = state.with_params(params)
    params = self.learner.frozen.model.params
    return state.with_fixed("teacher", params, self.trainer.state)

  def run(self, num_steps, state=None):
    state, metrics = self.state() if state is None else state, []
    for i in range(num_steps):
      batch = sharding.to_global(tiny.batch(i, self.config), self.mesh)
      state, values = self.trainer.train_step(state, batch)
      metrics.append({k: float(v) for k, v in values.items()})
    return state, metrics


class Value(NamedTuple):
  """The loss of a batch, without its gradient.

  metrics: The mean of every sum.
  ours, theirs: (logits, intermediates) of student and teacher.
  params: Parameters of the student.
  """

  metrics: dict[str, float]
  ours: tuple
  theirs: tuple
  params: dict


RNG = jax.random.key(7)


def value(objective, teacher, images=None, **changes):
  """Computes the loss of the first batch, and the outputs that it is of.

  Args:
    images: What both see, floats; None: the images of the batch.
  """
  config = tiny.config(**changes)
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = objective.make(config.model, shape, {"teacher": teacher})
  batch = objective.paired(tiny.batch(0, config))
  if images is None:
    images = normalise(batch["image"])

  @jax.jit
  def both(batch, images, theirs):
    params = learner.module.init(jax.random.key(0), images[:1])["params"]
    params = jax.tree.map(  # the head begins with zeros
      lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )
    frozen_params = learner.frozen.model.params
    rows = learner.targets(frozen_params, batch, RNG, 0, None, None).rows
    total, count, named = learner.loss(
      params, batch | {"targets": rows}, RNG, 0
    )
    named = {"loss": (total, count), **named}
    ours = learner.module.apply({"params": params}, images)
    theirs = teacher.model.apply({"params": theirs}, images)
    return {k: a / b for k, (a, b) in named.items()}, ours, theirs, params

  result = both(batch, images, teacher.params)
  return Value(*jax.tree.map(lambda x: np.asarray(x, np.float64), result))


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(teacher, student, temperature=1.0):
  p, q = log_softmax(teacher / temperature), log_softmax(student / temperature)
  return temperature**2 * (np.exp(p) * (p - q)).sum(-1)


def cross_entropy(logits, targets):
  return -(targets * log_softmax(logits)).sum(-1)


def one_hot(labels):
  return np.eye(tiny.NUM_CLASSES)[labels]


def mean(losses):
  return losses[
    : tiny.config().data.batch_size - 1
  ].mean()  # the last is masked


# The losses.


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_logits(temperature):
  objective = Distillation(teacher="x", temperature=temperature)
  metrics, (ours, _), (theirs, _), _ = value(objective, teacher_of())
  want = mean(kl(theirs, ours, temperature))
  assert want > 0.1
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
  agreement = mean(theirs.argmax(-1) == ours.argmax(-1))
  np.testing.assert_allclose(metrics["agreement"], agreement, rtol=1e-6)


@pytest.mark.parametrize("loss", ["soft", "hard"])
@pytest.mark.parametrize("token", [False, True])
def test_beside_labels(loss, token):
  options = {"soft": dict(alpha=0.1, temperature=3.0), "hard": {}}[loss]
  objective = Distillation(
    teacher="x", loss=loss, token=token, label_smoothing=0.1, **options
  )
  changes = DISTILLED if token else {}
  metrics, (logits, out), (theirs, _), params = value(
    objective, teacher_of(), **changes
  )
  of_labels = of_teacher = logits
  if token:
    of_labels, of_teacher = (
      out["encoded"][:, i] @ params[k]["kernel"] + params[k]["bias"]
      for i, k in enumerate(("head", "head_dist"))
    )
    np.testing.assert_allclose((of_labels + of_teacher) / 2, logits, atol=1e-5)
  labels = 0.9 * one_hot(tiny.batch(0, tiny.config())["label"]) + 0.01
  terms = dict(labels=cross_entropy(of_labels, labels))
  if loss == "soft":
    terms["teacher"] = kl(theirs, of_teacher, 3.0)
    want = 0.9 * terms["labels"] + 0.1 * terms["teacher"]
  else:
    terms["teacher"] = cross_entropy(of_teacher, one_hot(theirs.argmax(-1)))
    want = (terms["labels"] + terms["teacher"]) / 2
  for name, values in {"loss": want, **terms}.items():
    np.testing.assert_allclose(metrics[name], mean(values), rtol=1e-5)


def distance(a, b, kind):
  if kind == "cosine":
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return 1 - (a * b).sum(-1) / norms
  d = np.abs(a - b)
  return np.where(d < 1, d**2 / 2, d - 0.5).mean(-1)


@pytest.mark.parametrize(
  "kind, patch", [("cosine", 4), ("smooth_l1", 8), ("cosine", 16)]
)
def test_features(kind, patch):
  """The teacher's patches are resampled to the 2 x 2 of the student."""
  teacher = teacher_of(0, model__variant=f"Ti/{patch}")
  objective = Distillation(teacher="x", loss="features", distance=kind)
  metrics, (_, ours), (_, theirs), params = value(objective, teacher)
  side = 16 // patch
  to = METHODS["bilinear"](side, 2)
  wanted = theirs["encoded"][:, 1:].reshape(-1, side, side, 16)
  wanted = np.einsum("yh,xw,bhwd->byxd", to, to, wanted).reshape(-1, 4, 16)
  own = params["distillation"]

  def mapped(x, name):
    return x @ own[name]["kernel"] + own[name]["bias"]

  vector = mapped(ours["encoded"][:, 0], "vector")
  patches = mapped(ours["encoded"][:, 1:], "patches")
  vector = distance(vector, theirs["encoded"][:, 0], kind)
  patches = distance(patches, wanted, kind).mean(-1)
  np.testing.assert_allclose(metrics["vector"], mean(vector), rtol=1e-5)
  np.testing.assert_allclose(metrics["patches"], mean(patches), rtol=1e-5)
  np.testing.assert_allclose(metrics["loss"], mean(vector + patches), rtol=1e-5)


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_teacher_and_student_see_the_same_mixed_pixels(how):
  """And the labels are mixed alike."""
  objective = Distillation(teacher="x", loss="hard", **{how: 1.0})
  batch = tiny.batch(0, tiny.config())
  examples = normalise(batch["image"]), one_hot(batch["label"])
  others = [np.roll(x, 1, 0) for x in examples]
  images, labels = mixing.mix(
    *(*examples, others, np.roll(batch["mask"], 1)),
    *(RNG, objective.mixup, objective.cutmix),
  )
  assert np.abs(images - examples[0]).max() > 0.1
  metrics, (ours, _), (theirs, _), _ = value(objective, teacher_of(), images)
  want = cross_entropy(ours, np.asarray(labels))
  want += cross_entropy(ours, one_hot(theirs.argmax(-1)))
  np.testing.assert_allclose(metrics["loss"], mean(want) / 2, rtol=1e-5)


def test_the_teacher_has_its_own_pixels():
  """The same crop at another size; its 3 x 3 patches become 2 x 2."""
  ops = "decode|resize(24)"
  objective = Distillation(teacher="x", loss="features", teacher_ops=ops)
  views = objective.views("decode|resize(16)")
  assert views["image"] == View("decode|resize(16)")
  assert views["teacher"] == View(ops, like="image")
  assert objective.models_size((16, 16)) == (24, 24)
  teacher = teacher_of(0, side=24)
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = objective.make(tiny.config().model, shape, {"teacher": teacher})
  batch, rng = tiny.batch(0, tiny.config()), np.random.default_rng(0)
  batch["teacher"] = rng.integers(0, 256, (16, 24, 24, 3), np.uint8)

  @jax.jit
  def both(params, theirs, batch):
    rows = learner.targets(params, batch, RNG, 0, None, None).rows
    images = normalise(batch["teacher"])
    return rows, teacher.model.apply({"params": theirs}, images)[1]["encoded"]

  params = learner.frozen.model.params
  rows, tokens = jax.device_get(both(params, teacher.params, batch))
  np.testing.assert_allclose(rows["vector"], tokens[:, 0], atol=1e-5)
  to = METHODS["bilinear"](3, 2)
  want = tokens[:, 1:].reshape(16, 3, 3, 16)
  want = np.einsum("yh,xw,bhwd->byxd", to, to, want).reshape(16, 4, 16)
  np.testing.assert_allclose(rows["patches"], want, atol=1e-5)


def test_columns_are_those_of_the_names():
  """A teacher with more classes in another order."""
  order = np.random.default_rng(0).permutation(tiny.NUM_CLASSES + 2)
  names = (*NAMES, "one more", "another")
  teacher = teacher_of(len(names), names=tuple(names[i] for i in order))
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4, class_names=NAMES)
  config, objective = tiny.config(), Distillation(teacher="x")
  models = {"teacher": teacher}
  assert not list(objective.make_errors(config.model, shape, models))
  learner = objective.make(config.model, shape, models)
  batch = tiny.batch(0, config)
  arguments = jax.random.key(0), 0, None, None
  targets = jax.jit(lambda p, b: learner.targets(p, b, *arguments).rows)
  got = targets(learner.frozen.model.params, batch)
  images = normalise(batch["image"])
  apply = jax.jit(teacher.model.apply)
  logits, _ = apply({"params": teacher.params}, images)
  columns = [int(np.argwhere(order == i)[0, 0]) for i in range(len(NAMES))]
  np.testing.assert_allclose(got, logits[:, columns], rtol=1e-4, atol=1e-5)


# The teacher.


def test_the_teacher_does_not_move_and_is_in_no_optimizer():
  objective = Distillation(teacher="x", mixup=1.0)
  parts = Parts(objective, teacher_of(model__width=32, model__depth=2))
  state, _ = parts.run(3)
  jax.tree.map(
    np.testing.assert_array_equal,
    state.fixed["teacher"],
    parts.learner.frozen.model.params,
  )
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.ndim)
  assert size(state.opt_state) == 2 * size(state.params)

  # One's own teacher: both see the same mixed pixels in a step.
  state = parts.state()
  params = stack_blocks(jax.device_get(state.params), parts.config.model)
  state = state.with_fixed("teacher", params, parts.trainer.state)
  _, (metrics,) = parts.run(1, state)
  assert abs(metrics["loss"]) < 1e-6 and metrics["agreement"] == 1


def test_bfloat16_halves_its_kernels_and_changes_no_result():
  """The step would round the same kernels."""
  teacher = teacher_of()
  results = []
  for dtype in ("bfloat16", "float32"):
    made = frozen(teacher, "bfloat16")
    if dtype == "float32":
      made = dataclasses.replace(made, params=frozen(teacher, "float32").params)
    images = normalise(tiny.batch(0, tiny.config())["image"])
    apply = jax.jit(made.model.apply)
    results.append(apply({"params": made.params}, images)[0])
    sizes = {x.dtype.name: 0 for x in jax.tree.leaves(made.params)}
    for x in jax.tree.leaves(made.params):
      sizes[x.dtype.name] += x.size
    if dtype == "bfloat16":
      assert sizes["bfloat16"] > 5 * sizes["float32"]
  np.testing.assert_array_equal(*results)


MESHES = {
  "2x2": (4, dict(mesh__fsdp=2, mesh__data=2)),
  "8": (8, dict(mesh__fsdp=8, mesh__data=1)),
  "tensor": (4, dict(mesh__tensor=2, mesh__fsdp=2)),
  "microbatches": (2, dict(optim__microbatch=2)),
}
CASES = {
  "logits": dict(mixup=1.0),
  "hard": dict(cutmix=1.0, token=True),
  "soft": dict(label_smoothing=0.1),
  "features": {},
}


@functools.cache
def trained(loss, mesh=None, dtype="float32"):
  number, changes = MESHES.get(mesh, (1, {}))
  objective = Distillation(
    teacher="x", loss=loss, teacher_dtype=dtype, **CASES[loss]
  )
  token = DISTILLED if objective.token else {}
  teacher = teacher_of(model__variant="Ti/4" if loss == "features" else "Ti/8")
  devices = jax.devices()[:number]
  parts = Parts(objective, teacher, devices, **changes, **SGD, **token)
  return parts.run(3)[1]


def _mark(loss, mesh):
  if (loss, mesh) == ("hard", "microbatches"):
    return []
  some = [("logits", "2x2"), ("features", "8"), ("features", "tensor")]
  return pytest.mark.slow if (loss, mesh) in some else pytest.mark.nightly


@pytest.mark.parametrize(
  "loss, mesh",
  [
    pytest.param(loss, mesh, marks=_mark(loss, mesh))
    for loss in CASES
    for mesh in MESHES
  ],
)
def test_equal_on_any_mesh_and_in_microbatches(loss, mesh):
  for a, b in zip(trained(loss), trained(loss, mesh), strict=True):
    for key in a:  # float32, sums in another order, in three steps
      np.testing.assert_allclose(a[key], b[key], rtol=3e-5, err_msg=key)


@pytest.mark.slow
def test_a_teacher_in_bfloat16_on_a_mesh():
  one, many = trained("logits"), trained("logits", "2x2", "bfloat16")
  for a, b in zip(one, many, strict=True):
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=0.05)


def test_its_memory_is_split_block_by_block():
  parts = Parts(
    Distillation(teacher="x"),
    teacher_of(model__depth=2),
    jax.devices()[:4],
    mesh__fsdp=4,
  )
  encoder = parts.trainer.state.fixed["teacher"]["Transformer"]
  kernel = encoder["encoderblock"]["MlpBlock_0"]["Dense_0"]["kernel"]
  assert kernel.shape == (2, 16, 64)
  assert kernel.sharding.shard_shape(kernel.shape) == (2, 4, 64)


def test_flops_are_those_of_both():
  teacher = teacher_of()
  model, shape = tiny.config().model, RunShape(10, (16, 16), 4)
  of_teacher = 2 * teacher.config.forward_macs((16, 16), 10)
  learner = Distillation(teacher="x").make(model, shape, {"teacher": teacher})
  want = model.train_flops((16, 16), 10) + of_teacher
  assert learner.flops(model, shape) == want
  objective = Distillation(teacher="x", loss="features")
  learner = objective.make(model, shape, {"teacher": teacher})
  own = 6 * 32 * 16 * (1 + 4)
  want = model.train_flops((16, 16), 0) + own + of_teacher
  assert learner.flops(model, shape) == want


# Runs.


def write_teacher(path, teacher):
  config = tiny.config()
  write_params(
    str(path),
    teacher.params,
    dict(
      config={**to_dict(config), "model": dataclasses.asdict(teacher.config)},
      image_size=[*teacher.image_size],
      grid=[*teacher.config.grid(teacher.image_size)],
      num_classes=teacher.num_classes,
      has_cls_row=True,
    ),
  )
  return str(path)


class Ends(Callback):
  def check_stop(self, step):
    if step == 2:
      raise Stop("a test")


def test_only_the_address_of_the_teacher_may_change():
  old = Distillation(teacher="/a/teacher", mixup=0.8)
  new = dataclasses.replace(old, teacher="/b/teacher", mixup=0.7)
  configs = (
    dataclasses.replace(tiny.config(), objective=o) for o in (old, new)
  )
  changes = resume_rules.differences(to_dict(next(configs)), next(configs))
  found = {c.key: c.rule.makes_another_run for c in changes}
  assert found == {"objective.teacher": False, "objective.mixup": True}


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_in_the_same_bits(tmp_path):
  """A moved teacher is the same; a changed one is refused."""
  teacher = teacher_of()
  first = write_teacher(tmp_path / "teacher", teacher)
  config = tiny.config(total_steps=4, checkpoint__every_steps=2, log_steps=1)
  make = lambda path: dataclasses.replace(
    config, objective=Distillation(teacher=path, loss="hard", mixup=0.8)
  )
  workdir, other = str(tmp_path / "a"), str(tmp_path / "b")
  whole = train_and_evaluate(make(first), workdir, tiny.Data())
  assert load_metadata(workdir)["models"]["teacher"]["path"] == first
  assert load_metadata(workdir)["models"]["teacher"]["digest"]
  with pytest.raises(Stop):
    train_and_evaluate(make(first), other, tiny.Data(), callbacks=[Ends()])

  moved = str(tmp_path / "moved")
  (tmp_path / "teacher").rename(moved)
  state = train_and_evaluate(make(moved), other, tiny.Data())
  jax.tree.map(np.testing.assert_array_equal, state, whole)
  assert load_metadata(other)["models"]["teacher"]["path"] == moved
  assert not [f for f in (tmp_path / "b").rglob("*teacher*")]

  # The student alone.
  vit = vit_jax.load(other, verbose=False)
  assert vit.num_classes == tiny.NUM_CLASSES and vit.loss == "softmax"
  jax.tree.map(np.testing.assert_array_equal, vit.params, whole.params)

  teacher.params["embedding"]["bias"] += 1.0
  changed = write_teacher(tmp_path / "changed", teacher)
  with pytest.raises(ConfigError, match="digest"):
    train_and_evaluate(make(changed), other, tiny.Data())
  with pytest.raises(ConfigError, match="another loss"):
    new = Distillation(teacher=moved, loss="hard", mixup=0.7)
    new = dataclasses.replace(config, objective=new)
    train_and_evaluate(new, other, tiny.Data())


def test_a_student_of_features_leaves_its_maps_behind(tmp_path):
  path = write_teacher(tmp_path / "teacher", teacher_of(0))
  objective = Distillation(teacher=path, loss="features")
  config = dataclasses.replace(tiny.config(total_steps=1), objective=objective)
  state = train_and_evaluate(config, str(tmp_path / "a"), tiny.Data())
  vit = vit_jax.load(str(tmp_path / "a"), verbose=False)
  assert vit.num_classes == 0 and len(vit.report.ignored) == 4
  want = {k: v for k, v in state.params.items() if k != "distillation"}
  jax.tree.map(np.testing.assert_array_equal, vit.params, want)


@pytest.mark.slow
def test_a_run_with_pixels_of_its_own_for_the_teacher(tmp_path):
  """Its positions are resized, too."""
  path = write_teacher(tmp_path / "teacher", teacher_of(0))
  objective = Distillation(
    teacher=path, loss="features", teacher_ops="decode|resize(24)"
  )
  config = tiny.config(total_steps=1, log_steps=1, data__dataset="digits")
  config = dataclasses.replace(config, objective=objective)
  train_and_evaluate(config, str(tmp_path / "a"))
  (row,) = (r for r in read_metrics(str(tmp_path / "a")) if "train/loss" in r)
  assert 0 < row["train/vector"] < 2 and 0 < row["train/patches"] < 2


# Words.


def test_options_that_do_not_fit():
  wrong = Distillation(loss="features", alpha=0.1, token=True)
  text = "\n".join(wrong.errors())
  assert "objective.teacher: got none" in text
  assert "objective.alpha: got 0.1, expected 0.5 for" in text
  assert "objective.token: got True" in text
  wrong = Distillation(teacher="x", cutmix=1.0, teacher_ops="decode|resize(8)")
  (error,) = wrong.errors()
  assert "cutmix" in error


def errors_of(objective, teacher, names=None, **changes):
  config = dataclasses.replace(tiny.config(**changes), objective=objective)
  if errors := checks.errors(config):
    return errors
  shape = RunShape(tiny.NUM_CLASSES, (16, 16), 4, class_names=names)
  return [*objective.make_errors(config.model, shape, {"teacher": teacher})]


FEATURES = Distillation(teacher="x", loss="features")
TOKEN = Distillation(teacher="x", loss="hard", token=True)


@pytest.mark.parametrize(
  "objective, teacher, text",
  [
    (Distillation(teacher="x"), dict(num_classes=0), "without a head"),
    (Distillation(teacher="x"), dict(num_classes=7), "7 classes"),
    (
      Distillation(teacher="x"),
      dict(names=tuple(f"other {i}" for i in range(10))),
      "(other 0, ",
    ),
    (FEATURES, tiny.RESNET, "no patch tokens"),
    (TOKEN, {}, "config.model.distilled: got False"),
    (Distillation(teacher="x"), dict(model__channels=1), "1 channels"),
  ],
)
def test_teachers_that_do_not_fit(objective, teacher, text):
  made = dict(num_classes=10, names=None) | teacher
  model = {k: v for k, v in made.items() if k.startswith("model__")}
  config = tiny.config(**({"model__width": 16} | model)).model
  given = Named(config, {}, made["num_classes"], (16, 16), made["names"])
  (error,) = errors_of(objective, given, NAMES)
  assert text in error


def test_a_resnet_learns_no_features():
  (error,) = errors_of(FEATURES, None, **tiny.RESNET)
  assert "expected a Transformer" in error


def test_a_size_that_the_teachers_patch_does_not_divide(tmp_path):
  """Before anything is compiled."""
  teacher = teacher_of(side=12, model__variant="Ti/6")
  path = write_teacher(tmp_path / "teacher", teacher)
  config = dataclasses.replace(
    tiny.config(), objective=Distillation(teacher=path)
  )
  with pytest.raises(ConfigError, match="multiples of the patch's side 6"):
    run_checks.setup(config, None, tiny.Data())


# Planning.


def test_a_published_teacher_is_planned_without_its_file():
  """Its table has the shapes."""
  objective = Distillation(
    teacher="hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m",
    loss="features",
    teacher_dtype="bfloat16",
  )
  config = tiny.config(num_classes=10, mesh__fsdp=8)
  config = dataclasses.replace(config, objective=objective)
  _, (state, _) = planner.lower(config, sharding.make_mesh(config.mesh))
  teacher = state.fixed["teacher"]
  kernel = teacher["Transformer"]["encoderblock"]["MlpBlock_0"]["Dense_0"]
  assert kernel["kernel"].shape == (12, 384, 1536)
  assert kernel["kernel"].dtype == jnp.bfloat16
  assert kernel["kernel"].sharding.shard_shape((12, 384, 1536)) == (
    12,
    48,
    1536,
  )
  objective = dataclasses.replace(objective, loss="logits")
  config = dataclasses.replace(config, objective=objective)
  with pytest.raises(ConfigError, match="without a head"):
    planner.lower(config, sharding.make_mesh(config.mesh))

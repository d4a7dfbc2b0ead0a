"""Updates as algebra; optimizers by import path; the structure of the state."""

import collections
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from steps import by_path

from vit_jax import optim, optim_checks, param_groups, schedules
from vit_jax.config import OptimConfig
from vit_jax.config.schema import READ_BY
from vit_jax.families import ViTConfig
from vit_jax.models import build
from vit_jax.models.stacking import stack_blocks, unstack_blocks

MODEL = ViTConfig()
PARAMS = {
  "Transformer": {
    "encoderblock_0": {"Dense_0": {"kernel": jnp.full((2, 2), 2.0)}},
    "posembed_input": {"pos_embedding": jnp.ones((1, 3, 2))},
  },
  "head": {"kernel": jnp.full((2, 1), -1.0), "bias": jnp.ones((1,))},
}
GRADS = jax.tree.map(lambda p: 0.25 * p, PARAMS)


def _updates(config, factors):
  """Parameters after each step, whose gradients are `GRADS` times a factor."""
  tx, _ = optim.make_optimizer(config, 100, MODEL)
  params, state, history = PARAMS, tx.init(PARAMS), []
  for factor in factors:
    grads = jax.tree.map(lambda g, f=factor: f * g, GRADS)
    updates, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
    history.append(params)
  return history


# The rules in numpy, float64: update of a gradient g in step t = 1, 2, ...; m
# is what they remember of a parameter, at first zero.


def _adam(m, g, t, path):
  m["first"] = 0.9 * m["first"] + 0.1 * g
  m["second"] = 0.999 * m["second"] + 0.001 * g**2
  second = m["second"] / (1 - 0.999**t)
  return m["first"] / (1 - 0.9**t) / (np.sqrt(second) + 1e-8)


def _sgd(m, g, t, path):
  m["sum"] = 0.9 * m["sum"] + g
  return m["sum"]


def _lion(m, g, t, path):
  update = np.sign(0.9 * m["mean"] + 0.1 * g)
  m["mean"] = 0.99 * m["mean"] + 0.01 * g
  return update


def _adafactor(m, g, t, path):
  """Rows and columns of the second moment, whose decay is 1 - t^-0.8."""
  decay = min(0.5, 1 - t**-0.8)

  def moved(key, x):
    m[key] = decay * m[key] + (1 - decay) * x
    return m[key]

  if g.ndim == 2 and min(g.shape) >= 32:
    rows, columns = moved("rows", (g**2).mean(1)), moved("cols", (g**2).mean(0))
    second = np.outer(rows, columns) / rows.mean()
  else:
    second = moved("all", g**2)
  m["mean"] = 0.7 * m["mean"] + 0.3 * g / np.sqrt(second)
  return m["mean"]


def _muon(m, g, t, path):
  """Bias-corrected, one step of the momentum ahead, five Newton-Schulz steps.

  Only of the kernels in blocks.
  """
  if not path.startswith("Transformer") or not path.endswith("kernel"):
    return _adam(m, g, t, path)
  m["mean"] = 0.95 * m["mean"] + 0.05 * g
  ahead = 0.95 * m["mean"] / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
  inputs = 2 if "/out/" in path else 1
  x = ahead.reshape(math.prod(g.shape[:inputs]), -1)
  x = x / np.linalg.norm(x)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return 0.2 * np.sqrt(max(x.shape)) * x.reshape(g.shape)


RULES = {
  "adamw": (_adam, {}),
  "sgd": (_sgd, {}),
  "lion": (_lion, {}),
  "lamb": (_adam, {}),
  "adafactor": (_adafactor, dict(momentum=0.7, beta2=0.5)),
  "muon": (_muon, {}),
  # By import path: a rate, a decay and a mask; none of them; a rate.
  "optax:adamw": (_adam, {}),
  "optax:scale_by_adam": (_adam, {}),
  "optax:adam(b1=0.9, b2=0.999)": (_adam, {}),
}


def _random_tree(rng):
  """Two blocks whose kernels have very different lengths."""
  draw = lambda *shape: rng.normal(size=shape)

  def block(size):
    head = lambda: {"kernel": size * draw(32, 2, 16), "bias": draw(2, 16)}
    names = ("query", "key", "value")
    attention = {name: head() for name in names}
    attention["query"]["kernel"] *= 3
    attention["out"] = {"kernel": size * draw(2, 16, 32)}
    return {
      "MultiHeadDotProductAttention_0": attention,
      "MlpBlock_0": {"Dense_0": {"kernel": size * draw(32, 48)}},
      "LayerScale_0": {"scale": 1e-6 * draw(32)},
    }

  blocks = {"encoderblock_0": block(1.0), "encoderblock_1": block(0.1)}
  head = {"kernel": draw(32, 40), "bias": draw(40)}
  return {"Transformer": blocks, "head": head}


RNG = np.random.default_rng(0)
FIRST, *STEPS = (_random_tree(RNG) for _ in range(6))  # and five gradients


def _reference(name, schedule):
  rule, _ = RULES[name]
  w = flatten_dict(FIRST, sep="/")
  memory = {path: collections.defaultdict(float) for path in w}
  for t, grads in enumerate(STEPS, 1):
    grads = flatten_dict(grads, sep="/")
    u = {k: rule(memory[k], grads[k], t, k) for k in w}
    kernels = [k for k in w if k.endswith("kernel")]
    for k in kernels:
      u[k] = u[k] + 0.3 * w[k]
    if name == "lamb":  # query, key and value have one norm
      for _, group in itertools.groupby(
        sorted(kernels, key=_shared), key=_shared
      ):
        group = [*group]
        norm = lambda x, of=group: sum((x[k] ** 2).sum() for k in of) ** 0.5
        ratio = norm(w) / norm(u)
        u |= {k: ratio * u[k] for k in group}
    w = {k: w[k] - float(schedule(t - 1)) * u[k] for k in w}
  return unflatten_dict(w, sep="/")


def _shared(path):
  for name in ("query", "key", "value"):
    path = path.replace(name, "qkv")
  return path


def _after(tx, scan=False):
  """The parameters after five updates, of blocks in a loop or in a scan."""
  form = lambda tree: jax.tree.map(
    jnp.float32, stack_blocks(tree, ViTConfig) if scan else tree
  )

  @jax.jit
  def run(params, steps):
    def step(carry, grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    return jax.lax.scan(step, carry, steps)[0][0]

  steps = jax.tree.map(lambda *x: jnp.stack(x), *map(form, STEPS))
  return unstack_blocks(run(form(FIRST), steps), ViTConfig)


def _close(a, b, **tolerances):
  close = lambda x, y: np.testing.assert_allclose(x, y, **tolerances)
  jax.tree.map(close, a, b)


@pytest.mark.parametrize(
  "scan", [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.parametrize("name", RULES)
def test_five_updates_are_those_of_numpy(name, scan):
  """Warm-up, decay of kernels, and blocks of a scan as those of a loop."""
  config = OptimConfig(
    name=name, lr=0.1, warmup_steps=1, weight_decay=0.3, **RULES[name][1]
  )
  tx, schedule = optim.make_optimizer(config, 10, MODEL)
  # Float32. Newton-Schulz amplifies its rounding by up to 3.4445 in each step.
  atol = 1e-4 if name == "muon" else 5e-6
  _close(_after(tx, scan), _reference(name, schedule), rtol=1e-5, atol=atol)


HERE = __name__
GIVEN = {}  # the last arguments of `recorded`


def recorded(learning_rate, weight_decay=0.5):
  GIVEN.update(learning_rate=learning_rate, weight_decay=weight_decay)
  return optax.sgd(learning_rate)


def raises():
  raise RuntimeError("no luck")


def no_transformation():
  return 3


def _made(name, **options):
  config = OptimConfig(name=name, lr=0.1, warmup_steps=1, **options)
  return optim.make_optimizer(config, 10, MODEL)[0]


def test_arguments_of_an_imported_optimizer():
  got = _after(
    _made("optax:contrib.ademamix(b3=0.9,alpha=2.0)", weight_decay=0.3)
  )
  config = OptimConfig(lr=0.1, warmup_steps=1)
  schedule = schedules.make_schedule(config, 10)
  tx = optax.contrib.ademamix(
    schedule, b3=0.9, alpha=2.0, weight_decay=0.3, mask=param_groups.decay_mask
  )
  _close(got, _after(tx), rtol=1e-5, atol=1e-6)
  # optax's own default of a decay is not used, nor a decay without a mask.
  plain = _after(_made("adamw"))
  _close(_after(_made("optax:adamw")), plain, rtol=1e-5, atol=1e-6)
  got = _after(_made(f"{HERE}:recorded", weight_decay=0.3))
  assert GIVEN["weight_decay"] == 0.0
  assert float(GIVEN["learning_rate"](1)) == pytest.approx(0.1)
  want = _after(_made("sgd", weight_decay=0.3, momentum=0.0))
  _close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "name",
  [
    "optax:lars",
    pytest.param("optax:normalize_by_update_norm", marks=pytest.mark.slow),
  ],
)
def test_a_scan_moves_blocks_as_a_loop_does(name):
  """Norms of parameters, in the state or not, and of the whole tree."""
  loop, scan = (_after(_made(name, weight_decay=0.1), s) for s in (False, True))
  _close(loop, scan, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "word"),
  [
    ("optax:contrib.ademamiks", "contrib.ademamiks"),
    ("optax:adamw(b4=1)", "b4"),
    ("optax:adamw(learning_rate=1.0)", "learning_rate"),
    ("optax:adamw(weight_decay=1.0)", "weight_decay"),
    ("optax:adamw(b1='a')", "TypeError"),
    ("optax:polyak_sgd", "'value'"),
    (f"{HERE}:raises", "no luck"),
    (f"{HERE}:no_transformation", "returns 3"),
    (f"{HERE}:HERE", "a function"),
  ],
)
def test_errors_of_imported_optimizers(name, word):
  (error,) = optim_checks.errors(OptimConfig(name=name), FIRST, MODEL)
  assert "config.optim.name" in error and word in error


@pytest.mark.parametrize("name, stored", [("adamw", "mu"), ("sgd", "trace")])
def test_bfloat16_accumulator_decays_in_float32(name, stored):
  """20 steps of gradients that are as noisy as they are large."""
  sizes = np.geomspace(1e-4, 1e-2, 4096)
  noise = np.random.default_rng(0).normal(size=(20, 4096))
  gradients = np.float32(sizes * (1 + noise))
  config = OptimConfig(
    name=name, lr=1.0, schedule="constant", accumulator_dtype="bfloat16"
  )
  tx, _ = optim.make_optimizer(config, len(gradients), MODEL)
  state = tx.init({"w": jnp.zeros(4096)})
  update = jax.jit(tx.update)
  share = 1.0 if name == "sgd" else 0.1
  before = np.zeros(4096)
  for gradient in gradients:
    updates, state = update({"w": gradient}, state)
    got = np.asarray(getattr(state[0], stored)["w"])
    assert got.dtype == jnp.bfloat16
    after = 0.9 * before + share * gradient.astype("d")
    # Float32's rounding of products and of a sum whose terms may cancel.
    float32 = 2.0**-22 * (np.abs(before) + np.abs(gradient))
    if name == "sgd":
      assert (np.abs(-updates["w"] - after) <= float32).all()
    # What is stored is the nearest number of 8 bits.
    half = 2.0 ** (np.ceil(np.log2(np.abs(after) + float32)) - 9)
    assert (np.abs(got.astype("d") - after) <= half + float32).all()
    before = got.astype("d")


def test_ema_rises_as_in_tensorflow():
  """The numbers in the documentation's example: 0 -> 4.5 -> 4.555."""
  average = {"w": jnp.zeros(())}
  for step, new, want in ((0, 5.0, 4.5), (10_000, 10.0, 4.555)):
    weight = optim.ema_weight(0.99, step)
    average = optim.moved(average, {"w": new}, weight)
    np.testing.assert_allclose(average["w"], want, rtol=1e-6)


OTHERS = {
  "beta1": 0.5,
  "beta2": 0.5,
  "momentum": 0.5,
  "accumulator_dtype": "bfloat16",
  "end_lr": 0.05,
}
CHOICES = {
  key: OptimConfig.__dataclass_fields__[key].metadata["choices"]
  for key in ("name", "schedule")
}


@pytest.mark.parametrize(
  ("selector", "choice"),
  [(key, choice) for key, choices in CHOICES.items() for choice in choices],
)
def test_what_is_read(selector, choice):
  """An option changes the program of an update, or `checks` refuses it."""
  options = {"lr": 0.1, selector: choice}
  if choice == "step":
    options["decay_at"] = (0.5,)
  dense = {"Dense_0": {"kernel": jnp.zeros((32, 32))}}
  params = {"MlpBlock_0": dense, "w": 0.0}

  def program(**changed):
    tx, _ = optim.make_optimizer(OptimConfig(**options | changed), 10, MODEL)
    return str(jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p))(params))

  plain = program()
  got = {
    key for key, value in OTHERS.items() if program(**{key: value}) != plain
  }
  chosen = dataclasses.asdict(OptimConfig()) | {selector: choice}
  read = {key for key, (by, of) in READ_BY.items() if chosen[by] in of}
  assert OTHERS.keys() == READ_BY.keys() and got == read


@pytest.mark.parametrize(
  "options, name, word",
  [
    (dict(freeze=("embeding/*",)), "freeze", "'embeding/*'"),
    (dict(freeze=("*",)), "freeze", "train"),
    (dict(lr_scale=("head/*=10", "haed/kernel=3")), "lr_scale", "'head/kernel"),
    (dict(lr_zero=("head/*=10", "haed/kernel=3")), "lr_zero", "'haed/kernel'"),
    (dict(clip_groups=("haed/kernel",)), "clip_groups", "'haed/kernel'"),
    (dict(layer_decay=0.7), "layer_decay", "None"),
    # Muon needs a matrix that is trained.
    (dict(name="muon", freeze=("MlpBlock_0/*",)), "name", "another"),
  ],
)
def test_patterns_that_name_nothing_are_errors(options, name, word):
  dense = {"Dense_0": {"kernel": np.zeros((2, 2))}}
  params = {"head": {"kernel": 0.0}, "embedding": {"kernel": 0.0}}
  params["MlpBlock_0"] = dense
  (error,) = optim_checks.errors(OptimConfig(**options), params, MODEL)
  assert f"optim.{name}: " in error and word in error
  assert not optim_checks.errors(OptimConfig(name="muon"), params, MODEL)


def _model_params(**options):
  """Shapes of all kinds of parameters that a ViT has."""
  options = dict(width=8, depth=3, mlp_dim=16, num_heads=2) | options
  model = build(ViTConfig(**{"variant": "Ti/8"} | options), 4)
  images = jnp.zeros((1, 16, 16, 3))
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images))
  return shapes["params"]


def test_layers_of_mae_and_beit():
  params = _model_params(pool="map", pre_logits=True)
  params |= {"cls": 0.0, "registers": 0.0, "dist": 0.0, "head_dist": {"x": 0.0}}
  params["Transformer"]["pre_norm"] = {"scale": 0.0}
  layers = {}
  for path, number in by_path(param_groups.layers(params, MODEL)).items():
    block = path.startswith("Transformer/")
    layers.setdefault(number, set()).add("/".join(path.split("/")[: 1 + block]))
  inner = lambda *names: {f"Transformer/{name}" for name in names}
  stem = {"embedding", "cls", "registers", "dist"}
  heads = {"MAPHead_0", "pre_logits", "head", "head_dist"}
  assert layers == {
    0: stem | inner("posembed_input", "pre_norm"),
    1: inner("encoderblock_0"),
    2: inner("encoderblock_1"),
    3: inner("encoderblock_2"),
    4: heads | inner("encoder_norm"),
  }
  hybrid = _model_params(
    variant="R50+Ti/16", stage_blocks=(1,), stage_width=0.5
  )
  of_hybrid = by_path(param_groups.layers(hybrid, MODEL))
  root = {n for path, n in of_hybrid.items() if path.startswith("conv_root")}
  assert root == {0}


@pytest.mark.parametrize(
  "name, scan",
  [
    pytest.param("sgd", False, marks=pytest.mark.slow),
    ("sgd", True),
    ("optax:sgd", True),
  ],
)
def test_rates_of_layers_and_patterns(name, scan):
  """Each parameter moves by lr 0.75^(4 - layer), times its patterns' factors;
  so does its decay."""
  config = OptimConfig(
    name=name,
    lr=0.1,
    schedule="constant",
    momentum=0.0,
    weight_decay=0.5,
    layer_decay=0.75,
    lr_scale=("head/*=10", "*/kernel=2"),
  )
  params = jax.tree.map(lambda x: jnp.ones(x.shape), _model_params(scan=scan))
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
  if scan:
    updates = unstack_blocks(updates, ViTConfig)
  moved = {k: {*np.unique(v)} for k, v in by_path(updates).items()}
  want = {
    "embedding/kernel": 0.75**4 * 2 * 1.5,
    "embedding/bias": 0.75**4,
    "cls": 0.75**4,
    "Transformer/encoderblock_0/LayerNorm_0/scale": 0.75**3,
    "Transformer/encoderblock_2/MlpBlock_0/Dense_0/kernel": 0.75 * 2 * 1.5,
    "Transformer/encoder_norm/scale": 1.0,
    "head/bias": 10.0,
    "head/kernel": 10 * 2 * 1.5,
  }
  for path, factor in want.items():
    (got,) = moved[path]
    np.testing.assert_allclose(got, -0.1 * factor, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize(
  "name", ["adamw", "optax:sgd", "optax:adamw", "optax:scale_by_adam"]
)
def test_the_weight_decay_moves_along_half_a_cosine(name):
  """Values of the authors' schedule for DINOv2's short recipe."""
  config = OptimConfig(
    name=name,
    lr=1.0,
    schedule="constant",
    weight_decay=0.04,
    weight_decay_end=0.4,
  )
  decay = schedules.weight_decay(config, 125_000)
  tx, _ = optim.make_optimizer(config, 125_000, MODEL)
  zeros, first = jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS)
  update = jax.jit(tx.update)
  for position, want in (
    (0, 0.04),
    (1, 0.040000000056848894),
    (30_000, 0.04 + 0.36 * math.sin(math.pi / 2 * 0.24) ** 2),
    (124_999, 0.3999999999431511),
  ):
    np.testing.assert_allclose(decay(position), want, atol=6e-8)
    at = lambda x, n=position: x + n if x.dtype == jnp.int32 else x
    updates, _ = update(zeros, jax.tree.map(at, first), PARAMS)
    np.testing.assert_allclose(updates["head"]["kernel"], want, atol=6e-8)
    assert not updates["head"]["bias"].any()


def test_gradients_are_clipped_by_the_norm_of_all_or_of_groups():
  """The largest norm of each group is 2; blocks of a scan are no arrays."""
  ones = lambda *shape: jnp.ones(shape)
  block = {"Dense_0": {"kernel": ones(3, 4, 4), "bias": ones(3, 4)}}
  grads = {
    "Transformer": {"encoderblock": block},
    "cls": ones(8),
    "head": {"kernel": ones(4, 5), "bias": ones(5)},
  }

  def clipped(*groups, norm=2.0):
    config = OptimConfig(
      name="sgd", momentum=0.0, lr=1.0, clip_norm=norm, clip_groups=groups
    )
    tx, _ = optim.make_optimizer(config, 10, MODEL)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    return by_path(unstack_blocks(updates, ViTConfig))

  norm = lambda arrays: math.sqrt(sum(float((x**2).sum()) for x in arrays))
  every = clipped()
  np.testing.assert_allclose(norm(every.values()), 2.0, rtol=1e-5)
  length = norm(jax.tree.leaves(grads))  # all numbers are equal
  np.testing.assert_allclose(every["cls"], -2 / length, rtol=1e-5)
  # Gradients below the limit stay as they are.
  assert all((x == -1).all() for x in clipped(norm=2 * length).values())
  groups = {0: [], 1: [], 2: []}
  for path, x in clipped("head/*", "*/kernel").items():
    is_kernel = path.endswith("/kernel")
    groups[0 if path.startswith("head/") else 1 if is_kernel else 2].append(x)
  for arrays in groups.values():
    np.testing.assert_allclose(norm(arrays), 2.0, rtol=1e-5)
  for path, x in clipped("each").items():
    np.testing.assert_allclose(
      norm([x]), min(2.0, math.sqrt(x.size)), rtol=1e-5, err_msg=path
    )


def test_a_rate_is_zero_in_the_first_steps():
  """The moments go on: the third update is that of a run without."""
  config = OptimConfig(lr=0.1, schedule="constant", weight_decay=0.3)
  zero = dataclasses.replace(config, lr_zero=("head/kernel=2", "head/bias=1"))

  def moves(config):
    history = itertools.pairwise([PARAMS, *_updates(config, (1, -2, 3))])
    return [by_path(jax.tree.map(jnp.subtract, b, a)) for a, b in history]

  runs = zip(moves(zero), moves(config), strict=True)
  for step, (got, want) in enumerate(runs):
    for path, x in got.items():
      first = {"head/kernel": 2, "head/bias": 1}.get(path, 0)
      assert x.any() == (step >= first)
      if step >= first and path != "head/kernel":  # its decay follows its value
        np.testing.assert_allclose(x, want[path], atol=1e-6)


def test_new_options_leave_the_state_of_others_alone():
  """Checkpoints of earlier runs resume."""
  config = OptimConfig(lr=0.1, weight_decay=0.1, clip_norm=1.0)
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  state = jax.tree_util.tree_structure(tx.init(PARAMS))
  old = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(),
    optax.add_decayed_weights(0.1, param_groups.decay_mask),
    optax.scale_by_learning_rate(lambda step: 0.1),
  )
  assert state == jax.tree_util.tree_structure(old.init(PARAMS))


@pytest.mark.slow
def test_lamb_is_timm_s():
  """Five steps of an attention, whose query, key and value timm has as one."""
  import torch
  import torch_libraries

  timm = torch_libraries.load("timm.optim")
  rng = np.random.default_rng(0)
  shapes = (3, 8, 2, 4), (2, 4, 8), (8,)
  draw = lambda: [rng.normal(size=shape).astype("f") for shape in shapes]

  def tree(qkv, out, bias):
    names = ("query", "key", "value")
    attention = {n: {"kernel": x} for n, x in zip(names, qkv, strict=True)}
    attention["out"] = {"kernel": out, "bias": bias}
    block = {"MultiHeadDotProductAttention_0": attention}
    return {"Transformer": {"encoderblock_0": block}}

  first = draw()
  # Kernels [3, inputs, heads, width of a head] of very different lengths.
  first[0] *= np.float32([1.0, 0.3, 0.03])[:, None, None, None]
  theirs = [torch.nn.Parameter(torch.tensor(x)) for x in first]
  groups = [
    {"params": theirs[:2], "weight_decay": 0.05},
    {"params": theirs[2:], "weight_decay": 0.0},
  ]
  lamb = timm.Lamb(groups, lr=0.1, eps=1e-8, max_grad_norm=1.0)  # our eps
  config = OptimConfig(
    name="lamb", lr=0.1, schedule="constant", weight_decay=0.05, clip_norm=1.0
  )
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  ours = tree(*first)
  state = tx.init(ours)
  for _ in range(5):
    grads = draw()
    for parameter, grad in zip(theirs, grads, strict=True):
      parameter.grad = torch.tensor(grad)
    lamb.step()
    updates, state = tx.update(tree(*grads), state, ours)
    ours = optax.apply_updates(ours, updates)
  # Rounding of float32 in five steps of up to 0.2; the largest seen is 4e-6.
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  jax.tree.map(close, ours, tree(*(x.detach().numpy() for x in theirs)))

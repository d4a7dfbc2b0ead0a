"""A family of one's own, that of `examples/`, has what ours have.

It is plain linen, without a scan, and declares where its parts are.
"""

import dataclasses
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
import tiny
from flax.traverse_util import flatten_dict
from steps import ONE, drawn

import vit_jax
from vit_jax import optim_checks, param_groups, sharding, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import ConfigError, to_dict
from vit_jax.evaluators.features import tokens_error
from vit_jax.families import ModelConfig
from vit_jax.finetune import lora
from vit_jax.models import inspection
from vit_jax.models.resample import resample_posemb
from vit_jax.run_checks import setup
from vit_jax.tools.planning import planner
from vit_jax.weights import normalisation
from vit_jax.weights.weights_file import Pixels

NAME = "my_lab.plain:Plain"
PARTS = ("query", "key", "value", "out", "mlp_in", "mlp_out")
FINE_TUNING = {
  "layer_decay": dict(optim__layer_decay=0.5),
  "lora": dict(lora__rank=2, lora__targets=PARTS),
  "muon": dict(optim__name="muon"),
}


@pytest.fixture(scope="module")
def plain():
  """The family: two blocks, and 2 x 2 patches of an image of 16 pixels."""
  forget = lambda: [sys.modules.pop(n) for n in [*sys.modules] if "my_lab" in n]
  with pytest.MonkeyPatch.context() as patch:
    forget()
    patch.syspath_prepend(str(several.ROOT / "examples"))
    from my_lab.plain import Plain

    yield Plain(name=NAME, width=32, depth=2, patch=8)
  forget()


def with_other(plain, **declarations):
  """Returns the family with other class attributes, as `Other`."""
  cls = type("Other", (type(plain),), declarations)
  return cls(**dataclasses.asdict(plain))


def without(plain, *names):
  return with_other(plain, **{n: getattr(ModelConfig, n) for n in names})


def config_of(model, **changes):
  options = dict(model__width=None, model__depth=None, optim__lr=1e-3)
  c = tiny.config(num_classes=tiny.NUM_CLASSES, **options, **changes)
  return dataclasses.replace(c, model=model)


@pytest.fixture(scope="module")
def shapes(plain):
  return tiny.Parts(config_of(plain), ONE).shapes.params


@pytest.fixture(scope="module")
def run(plain, shapes, tmp_path_factory):
  """A checkpoint."""
  folder = str(tmp_path_factory.mktemp("own") / "run")
  about = dict(
    config=to_dict(config_of(plain)),
    image_size=[16, 16],
    grid=[2, 2],
    num_classes=tiny.NUM_CLASSES,
    has_cls_row=False,
  )
  checkpointer.write_params(folder, drawn(shapes), about)
  return folder


def images_of(side):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (2, side, side, 3)).astype("f")


def test_layers_and_matrices_are_those_that_it_declares(plain, shapes):
  numbers = flatten_dict(param_groups.layers(shapes, plain), sep="/")
  layers = {}
  for path, number in numbers.items():
    layers.setdefault(number, set()).add(path.split("/")[0])
  assert layers == {
    0: {"patches", "positions"},
    1: {"block_0"},
    2: {"block_1"},
    3: {"norm", "classifier"},
  }
  kernels = {k for k in numbers if k.startswith("block") and "kernel" in k}
  assert {k for k in numbers if plain.matrix(k)} == kernels
  assert len(kernels) == 2 * len(PARTS)
  options = config_of(plain, **FINE_TUNING["lora"]).lora
  split = lambda params: lora.split(params, options, jax.random.key(0), plain)
  trained, _ = jax.eval_shape(split, shapes)
  factors = {k for k in flatten_dict(trained, sep="/") if k.endswith(lora.A)}
  assert factors == {k.replace("kernel", lora.A) for k in kernels}


def test_positions_are_resized_and_attention_is_read(run):
  vit = vit_jax.load(run, image_size=48, verbose=False)
  assert vit.report.resized == {"positions": ((2, 2), (6, 6))}
  table = np.asarray(weights.read(run).params["positions"])
  np.testing.assert_array_equal(
    vit.params["positions"],
    resample_posemb(table, (2, 2), (6, 6), 0, "zoom"),
  )
  np.testing.assert_array_equal(
    inspection.position_table(vit.config, vit.params, (48, 48)),
    vit.params["positions"][0],
  )
  layers = vit.attention(images_of(48))
  assert layers.shape == (2, 2, 4, 36, 36)
  np.testing.assert_allclose(layers.sum(-1), 1, rtol=1e-5)
  maps = vit.attention_map(images_of(48))
  assert maps.shape == (2, 6, 6)
  row = np.asarray(inspection.rollout(layers)).mean(1)  # pooled by the mean
  np.testing.assert_allclose(maps.reshape(2, -1), row, rtol=1e-5)


@pytest.mark.parametrize(
  "name",
  [
    "layer_decay",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("lora", "muon")),
  ],
)
def test_what_is_not_declared_is_refused_with_the_option(plain, name):
  option = {"layer_decay": "optim.layer_decay", "lora": "lora.rank"}
  word = rf"config\.{option.get(name, 'optim.name')}.*Other\."
  model = without(plain, "STEM", "BLOCKS", "MATRICES")
  config = config_of(model, **FINE_TUNING[name])
  mesh = sharding.make_mesh(config.mesh, ONE)
  with pytest.raises(ConfigError, match=word):
    planner.checked(config, mesh)
  with pytest.raises(ConfigError, match=word):
    setup(config, data=tiny.Data())


@pytest.mark.parametrize(
  "declarations, options, word",
  [
    ({"STEM": r"patches/.*"}, "layer_decay", "no layer of positions"),
    ({"MATRICES": {r"query/kernel": (1, 1)}}, "muon", "Other.MATRICES"),
  ],
)
def test_a_declaration_that_does_not_fit_is_refused(
  plain, shapes, declarations, options, word
):
  config = config_of(plain, **FINE_TUNING[options])
  assert not optim_checks.errors(config.optim, shapes, plain)
  model = with_other(plain, **declarations)
  errors = optim_checks.errors(config.optim, shapes, model)
  assert errors and all(word in error for error in errors)


def test_what_reads_tokens_names_what_is_missing(plain, run):
  assert "no class token" in tokens_error("cls+patches", plain)
  one = {"num_class_tokens": 1}
  assert "Other.AFTER_BLOCK" in tokens_error("cls*2", with_other(plain, **one))
  declared = with_other(plain, AFTER_BLOCK="block_{}", LAST_NORM="norm", **one)
  assert tokens_error("cls*2", declared) is None
  assert "from 1 to 2" in tokens_error("cls*3", declared)
  file = weights.read(run)
  model = without(plain, "POSITIONS")
  images = jnp.zeros((1, 48, 48, 3))
  init = model.build(tiny.NUM_CLASSES).init
  target = jax.eval_shape(init, jax.random.key(0), images)["params"]
  with pytest.raises(ValueError, match=r"positions: .*Other\.POSITIONS"):
    weights.adapt(file, target, model, (48, 48))
  params = vit_jax.load(run, verbose=False).params
  for model, word in (
    (without(plain, "ATTENTION"), r"Other\.ATTENTION"),
    (with_other(plain, pool=None), "pool=None"),
  ):
    with pytest.raises(ValueError, match=word):
      inspection.attention_map(model, params, images[:, :16, :16])


@pytest.mark.slow
def test_the_normalisation_of_images_is_folded(run):
  vit = vit_jax.load(run, verbose=False)
  mean, std = (0.3, 0.4, 0.5), (0.2, 0.3, 0.4)
  file = dataclasses.replace(weights.read(run), pixels=Pixels(mean, std))
  arrays = normalisation.fold(file).params
  patches = {k: arrays[f"patches/{k}"] for k in ("kernel", "bias")}
  params = vit.params | {"patches": patches}
  pixels = (images_of(16) + 1) / 2
  apply = lambda params, x: vit.model.apply({"params": params}, x)[0]
  np.testing.assert_allclose(
    apply(params, 2 * pixels - 1),
    apply(vit.params, (pixels - mean) / std),
    rtol=1e-4,
    atol=1e-5,
  )


class Normed(nn.Module):
  @nn.compact
  def __call__(self, images, **_):
    x = nn.BatchNorm(use_running_average=True)(images.mean(axis=(1, 2)))
    return nn.Dense(10, name="classifier")(x), {"pre_logits": x}


def test_other_collections_are_refused(plain):
  config = config_of(with_other(plain, build=lambda self, _: Normed()))
  with pytest.raises(ConfigError, match="collection batch_stats"):
    setup(config, data=tiny.Data())
  with pytest.raises(ValueError, match="collection batch_stats"):
    tiny.Parts(config, ONE)

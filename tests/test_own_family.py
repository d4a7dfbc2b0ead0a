"""A family of one's own has what ours have, by its declaration."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict
from own_family import Own, Plain, Transformer
from steps import ONE, drawn

import vit_jax
from vit_jax import optim_checks, param_groups, sharding, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import ConfigError, to_dict
from vit_jax.evaluators.features import joined, tokens_error
from vit_jax.finetune import lora
from vit_jax.models import inspection
from vit_jax.models.resample import resample_posemb
from vit_jax.run_checks import setup
from vit_jax.tools.planning import planner
from vit_jax.weights import normalisation
from vit_jax.weights.weights_file import Pixels

KEY = jax.random.key(0)
NAMES = ("query", "key", "value", "out", "fc1", "fc2")
FINE_TUNING = {
  "layer_decay": dict(optim__layer_decay=0.5),
  "lora": dict(lora__rank=2, lora__targets=NAMES),
  "muon": dict(optim__name="muon"),
}


def config_of(model, **changes):
  options = dict(model__width=None, model__depth=None, optim__lr=1e-3)
  c = tiny.config(num_classes=tiny.NUM_CLASSES, **options, **changes)
  return dataclasses.replace(c, model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A checkpoint for images of 16 pixels, whose grid is 2 x 2."""
  folder = str(tmp_path_factory.mktemp("own") / "run")
  config = config_of(Own())
  about = dict(
    config=to_dict(config),
    image_size=[16, 16],
    grid=[2, 2],
    num_classes=tiny.NUM_CLASSES,
    has_cls_row=True,
  )
  params = drawn(tiny.Parts(config, ONE).shapes.params)
  checkpointer.write_params(folder, params, about)
  return folder


def test_layers():
  shapes = tiny.Parts(config_of(Own()), ONE).shapes.params
  numbers = flatten_dict(param_groups.layers(shapes, Own()), sep="/")
  layers = {}
  for path, number in numbers.items():
    layers.setdefault(number, set()).add(path.split("/")[0])
  assert layers == {
    0: {"patch_embed", "cls_token", "pos_embedding"},
    1: {"block_0"},
    2: {"block_1"},
    3: {"last_norm", "classifier"},
  }


def test_positions_are_resized_and_attention_is_read(run):
  vit = vit_jax.load(run, image_size=48, verbose=False)
  assert vit.report.resized == {"pos_embedding": ((2, 2), (6, 6))}
  table = np.asarray(weights.read(run).params["pos_embedding"])
  np.testing.assert_array_equal(
    vit.params["pos_embedding"],
    resample_posemb(table, (2, 2), (6, 6), 1, "zoom"),
  )
  images = np.random.default_rng(0).uniform(-1, 1, (2, 48, 48, 3)).astype("f")
  layers = vit.attention(images)
  assert layers.shape == (2, 2, 4, 37, 37)
  np.testing.assert_allclose(layers.sum(-1), 1, rtol=1e-5)
  maps = vit.attention_map(images)
  assert maps.shape == (2, 6, 6)
  row = np.asarray(inspection.rollout(layers))[:, 0, 1:]
  np.testing.assert_allclose(
    maps.reshape(2, -1), row / row.sum(-1, keepdims=True), rtol=1e-5
  )
  positions = inspection.position_table(vit.config, vit.params, (48, 48))
  np.testing.assert_array_equal(positions, vit.params["pos_embedding"][0, 1:])


def test_tokens_of_several_blocks_need_a_declaration():
  assert tokens_error("cls+patches", Own()) is None
  assert "Own.AFTER_BLOCK" in tokens_error("cls*2", Own())

  class Declared(Own):
    AFTER_BLOCK = "block_{}"
    LAST_NORM = "last_norm"
    ln_eps = 1e-6

  assert tokens_error("cls*2", Declared()) is None
  assert "from 1 to 2" in tokens_error("cls*3", Declared())
  model = Declared()
  module = Transformer(model, 0)
  images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)).astype("f")
  params = drawn(jax.eval_shape(module.init, KEY, images)["params"])
  _, out = jax.jit(module.apply)({"params": params}, images)
  got = joined(out, params, model, ("cls*2+patches",))
  norm = nn.LayerNorm().apply({"params": params["last_norm"]}, out["block_0"])
  want = [norm[:, 0], out["encoded"][:, 0], out["encoded"][:, 1:].mean(1)]
  np.testing.assert_allclose(got, np.concatenate(want, -1), rtol=1e-5)


def test_muon_and_adapters_take_the_declared_matrices():
  config = config_of(Own(), **FINE_TUNING["lora"])
  shapes = tiny.Parts(config_of(Own()), ONE).shapes.params
  flat = flatten_dict(shapes, sep="/")
  matrices = {k for k in flat if Own.matrix(k)}
  kernels = {k for k in flat if k.startswith("block") and "kernel" in k}
  assert matrices == kernels and len(matrices) == 2 * len(NAMES)
  split = lambda params: lora.split(params, config.lora, KEY, Own())
  trained, _ = jax.eval_shape(split, shapes)
  factors = {k for k in flatten_dict(trained, sep="/") if k.endswith(lora.A)}
  assert factors == {k.replace("kernel", lora.A) for k in matrices}


@pytest.mark.parametrize(
  "name",
  [
    "layer_decay",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("lora", "muon")),
  ],
)
def test_what_is_not_declared_is_refused_with_the_option(name):
  option = {"layer_decay": "optim.layer_decay", "lora": "lora.rank"}
  word = rf"config\.{option.get(name, 'optim.name')}.*Plain\."
  config = config_of(Plain(), **FINE_TUNING[name])
  mesh = sharding.make_mesh(config.mesh, ONE)
  with pytest.raises(ConfigError, match=word):
    planner.checked(config, mesh)
  with pytest.raises(ConfigError, match=word):
    setup(config, data=tiny.Data())


class NoStem(Own):
  STEM = "patch_embed/.*"


class Flat(Own):
  MATRICES = {r"query/kernel": (1, 1)}


@pytest.mark.parametrize(
  "model, options, words",
  [
    (NoStem(), "layer_decay", ["no layer of cls_token"]),
    (Flat(), "muon", ["Flat.MATRICES", "Flat.MATRICES"]),
  ],
)
def test_a_declaration_that_does_not_fit_is_refused(model, options, words):
  config = config_of(Own(), **FINE_TUNING[options])
  shapes = tiny.Parts(config_of(Own()), ONE).shapes.params
  assert not optim_checks.errors(config.optim, shapes, Own())
  errors = optim_checks.errors(config.optim, shapes, model)
  for error, word in zip(errors, words, strict=True):
    assert word in error


def test_positions_and_attention_that_are_not_declared(run):
  file = weights.read(run)
  file = dataclasses.replace(file, options=file.options | {"name": Plain.name})
  model = Transformer(Plain(), tiny.NUM_CLASSES)
  images = jnp.zeros((1, 48, 48, 3))
  target = jax.eval_shape(model.init, KEY, images)["params"]
  with pytest.raises(ValueError, match=r"pos_embedding: .*Plain\.POSITIONS"):
    weights.adapt(file, target, Plain(), (48, 48))

  class Silent(Own):
    pool = None

  params = vit_jax.load(run, verbose=False).params
  for model, word in ((Plain(), r"Plain\.ATTENTION"), (Silent(), "pool=None")):
    with pytest.raises(ValueError, match=word):
      inspection.attention_map(model, params, images[:, :16, :16])


@pytest.mark.slow
def test_the_normalisation_of_images_is_folded(run):
  file = weights.read(run)
  vit = vit_jax.load(run, verbose=False)
  mean, std = (0.3, 0.4, 0.5), (0.2, 0.3, 0.4)
  file = dataclasses.replace(file, pixels=Pixels(mean, std))
  arrays = normalisation.fold(file).params
  patches = {k: arrays[f"patch_embed/{k}"] for k in ("kernel", "bias")}
  params = vit.params | {"patch_embed": patches}
  pixels = np.random.default_rng(0).uniform(0, 1, (2, 16, 16, 3)).astype("f")
  apply = lambda params, x: vit.model.apply({"params": params}, x)[0]
  np.testing.assert_allclose(
    apply(params, 2 * pixels - 1),
    apply(vit.params, (pixels - mean) / std),
    rtol=1e-4,
    atol=1e-5,
  )


class Normed(Transformer):
  @nn.compact
  def __call__(self, images, **_):
    x = nn.BatchNorm(use_running_average=True)(images.mean(axis=(1, 2)))
    return nn.Dense(self.num_classes)(x), {"pre_logits": x}


class WithBatchNorm(Plain):
  def build(self, num_classes):
    return Normed(self, num_classes)


def test_other_collections_are_refused():
  config = config_of(WithBatchNorm())
  with pytest.raises(ConfigError, match="collection batch_stats"):
    setup(config, data=tiny.Data())
  with pytest.raises(ValueError, match="collection batch_stats"):
    tiny.Parts(config, ONE)

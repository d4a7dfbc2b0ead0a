"""Adapters in peft's files; test_parity.py compares them with peft itself."""

import json

import numpy as np
import pytest
import weight_files
from etils import epath
from safetensors.numpy import save_file
from weight_files import assert_same, hf_folder, message

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.finetune.lora_base import Factors
from vit_jax.zoo.files import peft as ours

NAMES = ("query", "key", "value", "out")
ATTENTION = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/"
MLP = "Transformer/encoderblock_{}/MlpBlock_0/"


def _factors(rank=3):
  """Factors of all maps of the model of `weight_files`, at random."""
  numbers = np.random.default_rng(1)
  draw = lambda *shape: numbers.normal(0, 0.3, shape).astype("f")
  return {
    path.format(i): Factors(draw(*inputs, rank), draw(rank, *outputs), 1.5)
    for i in range(2)
    for path, inputs, outputs in (
      *((ATTENTION + name, (48,), (4, 12)) for name in NAMES[:3]),
      (ATTENTION + "out", (4, 12), (48,)),
      (MLP + "Dense_0", (48,), (96,)),
      (MLP + "Dense_1", (96,), (48,)),
    )
  }


def _head(num_classes):
  return {
    "head/kernel": np.full((48, num_classes), 0.25, np.float32),
    "head/bias": np.arange(num_classes, dtype=np.float32),
  }


def _save(folder, arrays, config):
  folder.mkdir()
  save_file(arrays, folder / ours.ARRAYS)
  (folder / ours.CONFIG).write_text(json.dumps(config))
  return folder


def _adapter(folder, base, head=None):
  """Writes an adapter of a base; returns its folder."""
  return _save(folder, *ours.write(_factors(), head or {}, str(base)))


def _fused(factors, arrays):
  """One A for query, key and value of a block, as timm's attention has it."""
  arrays = {k: v for k, v in arrays.items() if "fc" in k or "class" in k}
  one = factors[ATTENTION.format(1) + "query"]
  factors = {k: v for k, v in factors.items() if "Attention" not in k}
  parts = []
  for i, name in enumerate(NAMES[:3]):
    b = one.b * (i + 1)
    parts.append(b.reshape(3, -1).T)
    factors[ATTENTION.format(1) + name] = one._replace(b=b)
  name = f"{ours.PREFIX}blocks.1.attn.qkv"
  arrays[f"{name}.lora_A.weight"] = np.ascontiguousarray(one.a.T)
  arrays[f"{name}.lora_B.weight"] = np.ascontiguousarray(np.concatenate(parts))
  return factors, arrays


@pytest.mark.parametrize("form", ["new", "old", "rslora", "fused"])
def test_adapters_are_read_and_merged(tmp_path, form):
  base, factors, head = hf_folder(tmp_path / "base"), _factors(), _head(11)
  arrays, config = ours.write(factors, head, str(base))
  assert config["lora_alpha"] == 1.5 * config["r"] == 4.5
  assert sorted(config["target_modules"]) == (
    ["fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"]
  )
  if form == "old":
    for new, old in weight_files.TRANSFORMERS.items():
      arrays = {k.replace(new, old): v for k, v in arrays.items()}
  if form == "rslora":
    config |= {"use_rslora": True, "lora_alpha": 1.5 * 3**0.5}
  if form == "fused":
    factors, arrays = _fused(factors, arrays)
  got = weights.read(_save(tmp_path / "adapter", arrays, config)).params
  expected = weights.read(base).params | head
  assert got.keys() == expected.keys()
  for name, array in expected.items():
    array = np.asarray(array)
    if factor := factors.get(name.removesuffix("/kernel")):
      product = factor.scale * np.tensordot(factor.a, factor.b, 1)
      assert np.abs(product).max() > 0.1
      array = array + product
    np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def test_the_revision_of_a_base_is_written_and_read(tmp_path):
  _, config = ours.write(_factors(), {}, "/a@b/vit")
  assert config["base_model_name_or_path"] == "/a@b/vit"
  assert config["revision"] is None
  asked = []

  def read_base(name):
    asked.append(name)
    raise FileNotFoundError("no network")

  for name, revision in (("me/vit", None), ("me/vit@v2", "v2")):
    folder = _adapter(tmp_path / str(revision), f"hf-hub:{name}")
    config = json.loads((folder / ours.CONFIG).read_text())
    assert config["base_model_name_or_path"] == "me/vit"
    assert config["revision"] == revision
    error = "base_model_name_or_path: .*no network"
    with pytest.raises(FileNotFoundError, match=error):
      ours.read(epath.Path(folder), read_base)
  assert asked == ["hf-hub:me/vit", "hf-hub:me/vit@v2"]


def test_a_new_head_has_no_names_and_loss_of_the_base(tmp_path):
  """Nor does it see the base's pooler. The base may be beside the adapter."""
  model = model_config(**weight_files.SIZE, pre_logits=True)
  base = hf_folder(tmp_path / "pooled", (32, 32), model=model, num_classes=0)
  assert "pre_logits/kernel" in weights.read(base).params
  read = weights.read(_adapter(tmp_path / "lora", "../pooled", _head(3)))
  assert not weights.identify(read.params, read.options).pre_logits
  assert_same({k: read.params[k] for k in _head(3)}, _head(3))

  base = hf_folder(
    tmp_path / "base",
    id2label={str(i): f"class {i}" for i in range(11)},
    problem_type="multi_label_classification",
  )
  old = weights.read(_adapter(tmp_path / "old", base))
  new = weights.read(_adapter(tmp_path / "new", base, _head(3)))
  assert (old.loss, len(old.class_names)) == ("sigmoid", 11)
  assert (new.loss, new.class_names) == (None, None)


def test_two_towers(tmp_path):
  model = model_config(**weight_files.SIZE, pool="map")
  base = hf_folder(tmp_path / "siglip", (32, 32), model=model, num_classes=0)
  arrays, config = ours.write(_factors(), {}, str(base))
  texts = {
    k.replace("vit.", "text_model.encoder."): v + 1 for k, v in arrays.items()
  }
  one = weights.read(_save(tmp_path / "0", arrays, config))
  both = weights.read(_save(tmp_path / "1", arrays | texts, config))
  assert_same(both, {k: np.asarray(v) for k, v in one.params.items()})
  text = message(_adapter(tmp_path / "head", base, _head(3)))
  assert "got a classifier" in text


FC1 = ours.PREFIX + "vit.layers.1.mlp.fc1.lora_{}.weight"
POOLER = f"{ours.PREFIX}vit.pooler.lora_A"


def _without(arrays):
  return {k: v for k, v in arrays.items() if k != FC1.format("B")}


def _cut(arrays):
  name = FC1.format("A")
  return arrays | {name: np.ascontiguousarray(arrays[name][:, :40])}


def _twice(arrays):
  """The same factors of another model."""
  return arrays | {k.replace("vit.", "other."): v for k, v in arrays.items()}


@pytest.mark.parametrize(
  "config, change, words",
  [
    ({"use_dora": True}, dict, "use_dora=True"),
    ({"peft_type": "IA3"}, dict, "peft_type='IA3'"),
    ({"init_lora_weights": "pissa_niter_16"}, dict, "pissa_niter_16"),
    ({"base_model_name_or_path": None}, dict, "no base_model_name_or_path"),
    ({"base_model_name_or_path": "/no/where"}, dict, "'/no/where'"),
    ({}, _without, "encoderblock_1/MlpBlock_0/Dense_0"),
    ({}, lambda a: a | {f"{POOLER}.weight": np.zeros((3, 48), "f")}, POOLER),
    ({}, _twice, "layers.0.attention.k_proj.lora_A.weight"),
    ({}, _cut, "(3, 40) and (96, 3)"),
  ],
)
def test_an_adapter_is_refused(tmp_path, config, change, words):
  base = hf_folder(tmp_path / "base")
  arrays, about = ours.write(_factors(), {}, str(base))
  folder = _save(tmp_path / "lora", change(arrays), about | config)
  assert words in message(folder)

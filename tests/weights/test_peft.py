"""Adapters in peft's files; the slow tests against peft itself."""

import json

import foreign
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch_libraries
import weight_files
from etils import epath
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

import vit_jax
from vit_jax import train
from vit_jax.config import model_config
from vit_jax.finetune.lora_base import Factors
from vit_jax.zoo.files import hf_classes
from vit_jax.zoo.files import peft as ours

IMAGE = foreign.image((16, 16))
SMALL = {
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "intermediate_size": 64,
  "image_size": 16,
  "patch_size": 8,
  "num_labels": tiny.NUM_CLASSES,
}
NAMES = ("query", "key", "value", "out")
ATTENTION = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/"
MLP = "Transformer/encoderblock_{}/MlpBlock_0/"
# Our maps in a block -> names of transformers 4.
OLD = {
  "attention.q_proj": "attention.attention.query",
  "attention.k_proj": "attention.attention.key",
  "attention.v_proj": "attention.attention.value",
  "attention.o_proj": "attention.output.dense",
  "mlp.fc1": "intermediate.dense",
  "mlp.fc2": "output.dense",
}


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


def _save(folder, arrays, config):
  folder.mkdir()
  save_file(arrays, folder / ours.ARRAYS)
  (folder / ours.CONFIG).write_text(json.dumps(config))
  return folder


def _merged(base, factors, head):
  """The logits of a base whose kernels got the products."""
  vit = vit_jax.load(base, verbose=False)
  flat = flatten_dict(vit.params, sep="/") | head
  for path, (a, b, scale) in factors.items():
    product = scale * np.tensordot(a, b, 1)
    flat[f"{path}/kernel"] = flat[f"{path}/kernel"] + product
  images = jnp.asarray(foreign.image((32, 48)))
  return vit.model.apply({"params": weight_files.nested(flat)}, images)[0]


@pytest.mark.parametrize(
  "form",
  [
    "fused",
    *(
      pytest.param(form, marks=pytest.mark.slow)
      for form in ("old", "new", "rslora")
    ),
  ],
)
def test_adapters_are_read_and_merged(tmp_path, form):
  base = weight_files.hf_folder(tmp_path / "base")
  factors = _factors()
  head = {
    "head/kernel": np.full((48, 11), 0.25, np.float32),
    "head/bias": np.arange(11, dtype=np.float32),
  }
  arrays, config = ours.write(factors, head, str(base))
  assert config["lora_alpha"] == 1.5 * config["r"] == 4.5
  assert sorted(config["target_modules"]) == (
    ["fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"]
  )
  if form == "old":
    for new, old in OLD.items():
      arrays = {k.replace(f".{new}.", f".{old}."): v for k, v in arrays.items()}
    arrays = {
      k.replace("vit.layers.", "vit.encoder.layer."): v
      for k, v in arrays.items()
    }
  if form == "rslora":
    config |= {"use_rslora": True, "lora_alpha": 1.5 * 3**0.5}
  if form == "fused":
    arrays = {k: v for k, v in arrays.items() if "fc" in k or "class" in k}
    one = factors[ATTENTION.format(1) + "query"]
    for path in [k for k in factors if "Attention" in k]:
      factors.pop(path)
    parts = []
    for i, name in enumerate(NAMES[:3]):
      b = one.b * (i + 1)
      parts.append(b.reshape(3, -1).T)
      factors[ATTENTION.format(1) + name] = one._replace(b=b)
    name = f"{ours.PREFIX}blocks.1.attn.qkv"
    arrays[f"{name}.lora_A.weight"] = np.ascontiguousarray(one.a.T)
    arrays[f"{name}.lora_B.weight"] = np.ascontiguousarray(
      np.concatenate(parts)
    )
  folder = _save(tmp_path / "adapter", arrays, config)
  got = vit_jax.load(folder, verbose=False)
  want = _merged(base, factors, head)
  logits = got(foreign.image((32, 48)))[0]
  np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
  assert (
    np.abs(
      want - vit_jax.load(base, verbose=False)(foreign.image((32, 48)))[0]
    ).max()
    > 0.1
  )


def test_the_base_may_be_beside_the_adapter(tmp_path):
  weight_files.hf_folder(tmp_path / "adapter")
  arrays, config = ours.write(_factors(), {}, ".")
  save_file(arrays, tmp_path / "adapter" / "x.safetensors")
  (tmp_path / "adapter" / "x.safetensors").unlink()
  folder = _save(
    tmp_path / "lora",
    arrays,
    config | {"base_model_name_or_path": "../adapter"},
  )
  assert vit_jax.load(folder, verbose=False).num_classes == 11


def test_a_base_of_a_hub(tmp_path):
  asked = []

  def read_base(name):
    asked.append(name)
    raise FileNotFoundError("no network")

  for number, revision in enumerate((None, "v2")):
    config = {"base_model_name_or_path": "me/vit", "revision": revision}
    arrays, _ = ours.write(_factors(), {}, "me/vit")
    folder = _save(tmp_path / str(number), arrays, config)
    error = "base_model_name_or_path: .*no network"
    with pytest.raises(FileNotFoundError, match=error):
      ours.read(epath.Path(folder), read_base)
  assert asked == ["hf-hub:me/vit", "hf-hub:me/vit@v2"]


@pytest.mark.parametrize(
  "base, name, revision",
  [("hf-hub:me/vit@v2", "me/vit", "v2"), ("/a@b/vit", "/a@b/vit", None)],
)
def test_the_revision_of_a_base_is_written(base, name, revision):
  _, config = ours.write(_factors(), {}, base)
  assert config["base_model_name_or_path"] == name
  assert config["revision"] == revision


def test_files_of_an_adapter_by_their_path(tmp_path):
  arrays, config = ours.write(_factors(), {}, "me/vit")
  folder = _save(tmp_path / "x", arrays, config)
  text = weight_files.message(folder / ours.ARRAYS)
  assert ".lora_A.weight" in text and "of no known model" in text


def _head(num_classes):
  return {
    "head/kernel": np.full((48, num_classes), 0.25, np.float32),
    "head/bias": np.arange(num_classes, dtype=np.float32),
  }


def _bare(folder, model):
  """A model of transformers without a head."""
  arrays, config = hf_classes.write(
    foreign.random_params(model, 0, (32, 32)),
    model,
    num_classes=0,
    image_size=(32, 32),
  )
  folder.mkdir()
  save_file(arrays, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def test_a_classifier_does_not_see_the_pooler(tmp_path):
  model = model_config(**weight_files.SIZE, pre_logits=True)
  base = _bare(tmp_path / "base", model)
  assert "pre_logits" in vit_jax.load(base, verbose=False).params
  folder = _save(
    tmp_path / "lora", *ours.write(_factors(), _head(3), str(base))
  )
  got = vit_jax.load(folder, verbose=False)
  assert not got.config.pre_logits
  images = foreign.image((32, 32))
  logits, out = got(images)
  head = _head(3)
  tokens = np.asarray(out["encoded"])[:, 0]
  want = tokens @ head["head/kernel"] + head["head/bias"]
  np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def test_a_new_head_has_no_names_and_loss_of_the_base(tmp_path):
  base = weight_files.hf_folder(
    tmp_path / "base",
    id2label={str(i): f"class {i}" for i in range(11)},
    problem_type="multi_label_classification",
  )
  load = lambda name, head: vit_jax.load(
    _save(tmp_path / name, *ours.write(_factors(), head, str(base))),
    verbose=False,
  )
  old, new = load("old", {}), load("new", _head(3))
  assert (old.loss, len(old.class_names)) == ("sigmoid", 11)
  assert (new.loss, new.class_names, new.num_classes) == ("softmax", None, 3)


def test_two_towers(tmp_path):
  base = _bare(
    tmp_path / "siglip", model_config(**weight_files.SIZE, pool="map")
  )
  arrays, config = ours.write(_factors(), {}, str(base))
  texts = {
    k.replace("vit.", "text_model.encoder."): v + 1 for k, v in arrays.items()
  }
  params = [
    flatten_dict(
      vit_jax.load(
        _save(tmp_path / str(i), arrays | more, config), verbose=False
      ).params,
      sep="/",
    )
    for i, more in enumerate(({}, texts))
  ]
  for name, array in params[0].items():
    np.testing.assert_array_equal(array, params[1][name])
  odd = {k.replace("vit.", "other."): v for k, v in arrays.items()}
  text = weight_files.message(_save(tmp_path / "odd", arrays | odd, config))
  assert "layers.0.attention.k_proj.lora_A.weight'" in text
  arrays, config = ours.write(_factors(), _head(3), str(base))
  text = weight_files.message(_save(tmp_path / "head", arrays, config))
  assert "got a classifier for CLIP or SigLIP" in text


def test_what_cannot_be_read(tmp_path):
  base = str(weight_files.hf_folder(tmp_path / "base"))
  arrays, config = ours.write(_factors(), {}, base)
  number = iter(range(9))

  def message(arrays=arrays, **changes):
    folder = _save(tmp_path / str(next(number)), arrays, config | changes)
    return weight_files.message(folder)

  assert "got use_dora=True, expected a plain LoRA" in message(use_dora=True)
  assert "got peft_type='IA3', expected" in message(peft_type="IA3")
  text = message(init_lora_weights="pissa_niter_16")
  assert "got init_lora_weights='pissa_niter_16', expected" in text
  text = message(base_model_name_or_path=None)
  assert "got no base_model_name_or_path" in text
  text = message(base_model_name_or_path="/no/where")
  assert "base_model_name_or_path: got '/no/where'" in text
  half = {k: v for k, v in arrays.items() if "1.mlp.fc2.lora_B" not in k}
  assert "encoderblock_1/MlpBlock_0/Dense_1" in message(half)
  odd = {"base_model.model.vit.pooler.lora_A.weight": np.zeros((3, 48), "f")}
  assert "got 'base_model.model.vit.pooler.lora_A" in message(arrays | odd)
  cut = {
    k: v[:, :40] if "lora_A" in k and "fc1" in k else v
    for k, v in arrays.items()
  }
  assert "got factors (3, 40) and (96, 3)" in message(cut)


@pytest.mark.parametrize(
  "factor, index, error",
  [
    ("lora_B", np.s_[:, :2], "got factors (3, 48) and (96, 2) of"),
    ("lora_A", np.s_[0], "got factors (48,) and (96, 3) of"),
  ],
)
def test_factors_of_another_shape(tmp_path, factor, index, error):
  base = str(weight_files.hf_folder(tmp_path / "base"))
  arrays, config = ours.write(_factors(), {}, base)
  name = f"{ours.PREFIX}vit.layers.1.mlp.fc1.{factor}.weight"
  arrays[name] = np.ascontiguousarray(arrays[name][index])
  folder = _save(tmp_path / "lora", arrays, config)
  assert error in weight_files.message(folder)


@pytest.fixture(scope="module")
def transformers():
  return torch_libraries.load("transformers")


def _model(transformers, folder, **options):
  """A ViT of transformers with random weights, read from a folder."""
  config = transformers.ViTConfig(**SMALL | options)
  theirs = transformers.ViTForImageClassification(config)
  foreign.randomise(theirs)
  theirs.save_pretrained(folder)
  return transformers.ViTForImageClassification.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_peft_saves_is_read(transformers, tmp_path, use_rslora):
  import peft

  config = peft.LoraConfig(
    r=4,
    lora_alpha=6,
    use_rslora=use_rslora,
    target_modules=["q_proj", "v_proj", "o_proj", "fc1", "fc2"],
    modules_to_save=["classifier"],
  )
  theirs = peft.get_peft_model(_model(transformers, tmp_path / "base"), config)
  for leaf in theirs.parameters():
    if leaf.requires_grad:
      leaf.data.normal_(0, 0.2)
  theirs.save_pretrained(tmp_path / "adapter")
  images = foreign.image((16, 16))
  want = foreign.torch_logits(theirs, images, "float32").logits
  got, _ = vit_jax.load(tmp_path / "adapter", verbose=False)(images)
  assert foreign.error(got, want) < 1e-5


@pytest.mark.slow
def test_what_a_run_writes_is_loaded_by_peft(transformers, tmp_path):
  import peft

  from vit_jax.__main__ import main

  base = tmp_path / "base"
  theirs = _model(transformers, base)
  config = tiny.config(
    init=str(base),
    lora__rank=2,
    lora__alpha=8.0,
    lora__targets=("query", "key", "value", "out", "Dense_0", "Dense_1"),
    model__gelu="erf",
    model__ln_eps=1e-12,
    model__scan=True,
    total_steps=3,
  )
  train.train_and_evaluate(config, str(tmp_path / "run"), tiny.Data())
  run, adapter = str(tmp_path / "run"), str(tmp_path / "adapter")
  main(["convert", run, adapter, "--to=peft"])
  ours_, images = vit_jax.load(run, verbose=False), foreign.image((16, 16))
  model = peft.PeftModel.from_pretrained(theirs, adapter)
  want = foreign.torch_logits(model, images, "float32").logits
  assert foreign.error(ours_(images)[0], want) < 1e-5
  # And back.
  again = vit_jax.load(adapter, verbose=False)
  np.testing.assert_array_equal(again(images)[0], ours_(images)[0])


MODERN = dict(model__name="modern", model__layer_scale=1.0, model__gelu="erf")
DINO = {
  "Dinov2WithRegistersForImageClassification": dict(
    **MODERN,
    model__registers=4,
    model__pool="token_gap",
    model__ln_eps=1e-6,
  ),
  "DINOv3ViTModel": dict(
    **MODERN,
    model__registers=4,
    model__rope="dinov3",
    model__posemb="none",
    model__ln_eps=1e-5,
    model__qkv_bias="no_key",
    model__mlp="swiglu",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DINO)
def test_dinov2_and_dinov3(transformers, tmp_path, kind):
  import peft

  from vit_jax.__main__ import main

  is_v3 = kind == "DINOv3ViTModel"
  gated = {"use_gated_mlp": True, "hidden_act": "silu"}
  options = {"num_register_tokens": 4, **gated} if is_v3 else {}
  config = getattr(
    transformers, "DINOv3ViTConfig" if is_v3 else "Dinov2WithRegistersConfig"
  )(**SMALL, **options, mlp_ratio=2)
  theirs = getattr(transformers, kind)(config)
  foreign.randomise(theirs)
  theirs.save_pretrained(tmp_path / "base")
  config = tiny.config(
    init=str(tmp_path / "base"),
    init_mean="half",
    lora__rank=2,
    lora__targets=("query", "out", "Dense_0", "Dense_1"),
    **DINO[kind],
  )
  train.train_and_evaluate(config, str(tmp_path / "run"), tiny.Data())
  adapter = str(tmp_path / "adapter")
  flags = ["--to=peft"] + ["--drop_head"] * is_v3
  main(["convert", str(tmp_path / "run"), adapter, *flags])
  vit, images = vit_jax.load(tmp_path / "run", verbose=False), IMAGE
  model = peft.PeftModel.from_pretrained(theirs, adapter)
  out = foreign.torch_logits(model, images, "float32")
  want = out.pooler_output if is_v3 else out.logits
  got = vit(images)[1]["pre_logits" if is_v3 else "logits"]
  assert foreign.error(got, want) < 1e-5


@pytest.mark.slow
def test_timm_s_fused_attention(tmp_path):
  import peft

  timm = torch_libraries.load("timm")
  theirs = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=32,
    embed_dim=32,
    depth=2,
    num_heads=4,
    num_classes=5,
  )
  foreign.randomise(theirs)
  save_file(
    {k: v.detach().numpy() for k, v in theirs.state_dict().items()},
    tmp_path / "base.safetensors",
  )
  config = peft.LoraConfig(
    r=3,
    lora_alpha=5,
    target_modules=r".*attn\.(qkv|proj)",
    modules_to_save=["head"],
  )
  model = peft.get_peft_model(theirs, config)
  for name, leaf in model.named_parameters():
    if "lora" in name:
      leaf.data.normal_(0, 0.2)
  model.save_pretrained(tmp_path / "adapter")
  file = tmp_path / "adapter" / ours.CONFIG
  about = json.loads(file.read_text())
  about["base_model_name_or_path"] = str(tmp_path / "base.safetensors")
  file.write_text(json.dumps(about))
  images = foreign.image((32, 32))
  want = foreign.torch_logits(model, images, "float32")
  got, _ = vit_jax.load(tmp_path / "adapter", num_heads=4, verbose=False)(
    images
  )
  assert foreign.error(got, want) < 1e-5

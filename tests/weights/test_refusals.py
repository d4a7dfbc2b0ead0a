"""Broken and foreign files are refused: the file or option and the reason.

A row of the tables is a file, options of `vit_jax.load` with it, and words that
the message must have: the file, array or option, and one key word.
"""

import pathlib
import pickle
import re
import shutil
import zipfile

import flax
import foreign
import numpy as np
import pytest
import weight_files
from weight_files import (
  DATA,
  MODEL,
  hf_folder,
  message,
  nested,
  openclip_folder,
  orbax,
  our_params,
  save,
  timm_file,
  trunk_folder,
)

import vit_jax
from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy
from vit_jax.zoo.files import hf_classes, key_prefixes, openclip, timm

DENSE = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
MODERN = dict(name="modern", **weight_files.SIZE)
SCALED = MODERN | dict(layer_scale=1e-5, gelu="erf")
DINOV3 = SCALED | dict(
  registers=3, posemb="none", rope="dinov3", ln_eps=1e-5, qkv_bias="no_key"
)
BIT = model_config(name="bit", variant="R50x0.5", stage_blocks=(1, 1))


def ones(*shape):
  return np.ones(shape, "f")


def npz(**changes):
  return lambda folder: save(folder / "x.npz", **changes)


def others(**arrays):
  def write(folder):
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"

  return write


def tree(**more):
  params = nested(our_params()) if "conv1" not in more else {}
  return lambda folder: orbax(folder / "tree", params | more)


def of_hf(config=None, changes=None, **options):
  return lambda folder: hf_folder(
    folder / "m", changes=changes, **options, **(config or {})
  )


def of_timm(about=None, changes=None, **options):
  def write(folder):
    if isinstance(model := options.get("model"), dict):
      options["model"] = model_config(**model)
    return timm_file(folder / "m", about, changes, **options)

  return write


def of_openclip(vision=None, changes=None, **about):
  return lambda folder: openclip_folder(folder / "m", vision, changes, **about)


def of_trunk(vision=None, changes=None, wrapper=""):
  return lambda folder: trunk_folder(folder / "m", vision, changes, wrapper)


def wrong_bias():
  bias = np.zeros(11, "f")
  bias[2] = np.inf
  return bias


ARRAYS = [
  (npz(**{DENSE: np.zeros((48, 95), "f")}), {}, (DENSE, "(48, 95)")),
  (npz(head__bias=wrong_bias()), {}, ("x.npz", "head/bias", "NaN")),
  (npz(head__bias=None), {}, ("head/bias", "fit together")),
  (npz(head__bias=np.zeros(11, int)), {}, ("head/bias", "int64")),
  (npz(**{POS_EMBEDDING: None}), {"image_size": 32}, ("pos_emb", "missing")),
  (npz(), {"depth": 4}, ("depth: got 4", "arrays")),
  (others(conv1=ones(7, 7, 3, 64)), {}, ("x.npz", "conv1", "no known model")),
  (lambda folder: folder / "none.npz", {}, ("none.npz", "does not exist")),
  (lambda folder: folder, {}, ("got '", "no checkpoint in it")),
  (tree(conv1={"kernel": ones(3)}), {}, ("tree", "conv1/kernel")),
  (tree(more=[ones(3)]), {}, ("tree", "'more'", "no array")),
  (tree(step=3), {}, ("step", "int")),
]
# What `mean` and `std` cannot be.
PIXELS = [
  (npz(), dict(mean=mean, std=std), words)
  for mean, std, words in (
    ("imagnet", 1, ("mean: got 'imagnet'",)),
    (0.5, None, ("mean, std: got 0.5, None",)),
    (0.5, 0, ("std: got 0",)),
    ("123.7,116.3,103.5", "58.4,57.1,57.4", ("mean: got '123.7,",)),
    (0, 255, ("std: got 255",)),
    ((0.5, 0.4), 0.5, ("channels",)),
  )
]
HEADS = {"num_heads": 4}
OURS = {"model": to_dict(MODEL), "image_size": [32, 32], "grid": [4, 4]}


def header(**changes):
  return of_timm(metadata={"vit_jax": OURS | changes})


TIMM = [
  (of_timm(), {}, ("num_heads",)),
  (of_timm(), {"num_heads": 7}, ("num_heads=7",)),
  *(  # config.json of another model
    (
      of_timm({"model_args": {**HEADS, **args}} | top),
      {},
      (f"config.json: {key}: got {value}",),
    )
    for args, top, key, value in (
      ({"act_layer": "silu"}, {}, "model_args.act_layer", "'silu'"),
      ({}, {"global_pool": "avgmax"}, "global_pool", "'avgmax'"),
      ({"use_rot_pos_emb": True}, {}, "model_args.use_rot_pos_emb", "True"),
      ({"depth": 3}, {}, "model_args.depth", "3"),
      ({"reg_tokens": 4}, {}, "model_args.reg_tokens", "4"),
      ({"init_values": 1e-5}, {}, "model_args.init_values", "True"),
      ({"qk_norm": True}, {}, "model_args.qk_norm", "True"),
      ({}, {"problem_type": "x"}, "problem_type", "'x'"),
    )
  ),
  (of_timm({"architecture": "vit_b_rpn_224.sw"}), {}, ("vit_b_rpn_224.sw",)),
  (
    of_timm({"mean": [0.4] * 3, "std": [0.5] * 3}, model=BIT, num_classes=3),
    {},
    ("0.4", "expected 0.5"),
  ),
  (
    of_timm({"model_args": {"output_stride": 16}}, model=BIT, num_classes=3),
    {},
    ("model_args.output_stride",),
  ),
  *(  # our own header
    (header(**changes), {}, words)
    for changes, words in (
      ({"model": to_dict(MODEL) | {"depth": 999}}, ("depth: got 999",)),
      ({"image_size": [36, 32]}, ("36 x 32", "multiples")),
      ({"class_names": [1]}, ("class_names: got 1",)),
    )
  ),
  (
    of_timm({"architecture": "vit_rope_x"}, model=DINOV3),
    HEADS,
    ("'vit_rope_x'",),
  ),
  (  # no table does not mean DINOv3
    of_timm(model=SCALED | dict(registers=3, posemb="none")),
    HEADS,
    ("position table",),
  ),
  *(
    (of_timm(None, {name: ones(1)}), HEADS, (f"{name}: got shape (1,)",))
    for name in ("pos_embed", "head.weight", "blocks.0.attn.qkv.weight")
  ),
  (
    of_timm(None, {f"blocks.{i}.attn.q_norm.weight": ones(4) for i in (0, 1)}),
    HEADS,
    ("got 2 arrays", "blocks.0.attn.q_norm.weight"),
  ),
]
VISION = f"{openclip.CONFIG}: model_cfg.vision_cfg."
OPENCLIP = [
  *(
    (of_openclip(vision), {}, (f"{VISION}{key}: got {value}",))
    for vision, key, value in (
      ({"pool_type": "none"}, "pool_type", "'none'"),
      ({"head_width": 5}, "head_width", "5"),
      ({"no_ln_pre": True}, "no_ln_pre", "True"),
    )
  ),
  (
    of_openclip({}, {"visual.positional_embedding": None}),
    {},
    ("pos_embedding: missing",),
  ),
  (of_openclip(preprocess_cfg={"size": "big"}), {}, ("size: got 'big'",)),
  *(
    (of_trunk(vision), HEADS, (f"{openclip.CONFIG}: {words}",))
    for vision, words in (
      ({"timm_pool": "tok"}, "timm_pool: got 'tok'"),
      ({"timm_model_kwargs": {"depth": 3}}, "timm_model_kwargs.depth: got 3"),
    )
  ),
  (
    of_trunk({}, {"visual.head.proj.weight": ones(8, 48)}, "module."),
    HEADS,
    ("module.visual.head.proj.weight", "layers"),
  ),
]
ROWS_OF_HF = {
  "vit.pooler.dense.weight": ones(48, 48),
  "vit.encoder.layer.0.q_norm.weight": ones(48),
  "vit.encoder.layer.0.output.dense.weight": ones(48),
}
PROCESSOR = "preprocessor_config.json"
HF = [
  *(
    (of_hf(config), {}, (f"{key}: got", str(value)))
    for config in (
      {"model_type": "dinov5"},
      {"num_hidden_layers": 3},
      {"patch_size": [16, 8]},
      {"problem_type": "x"},
    )
    for key, value in config.items()
  ),
  *(  # all of it in one error
    (
      of_hf({"hidden_act": "relu", "pooler_act": "relu"}, ROWS_OF_HF),
      {},
      (words,),
    )
    for words in (
      "hidden_act: got 'relu'",
      "pooler_act: got 'relu'",
      "layer.0.output.dense.weight: got shape (48,)",
      "layer.0.q_norm",
      "both pooler and classifier",
    )
  ),
  (
    of_hf({"rope_theta": 1e4}, model=model_config(**DINOV3), num_classes=0),
    {},
    ("rope_theta: got 10000.0",),
  ),
  (
    of_hf({}, {"vit.embeddings.position_embeddings": None}),
    {},
    ("pos_embedding: missing",),
  ),
  (of_hf({}, {"decoder2": ones(3)}), {}, ("arrays that no model", "decoder2")),
  *(
    (of_hf(about=about), {}, (PROCESSOR, f"{key}: got {value!r}"))
    for about in ({"size": "224"}, {"rescale_factor": 0})
    for key, value in about.items()
  ),
]


@pytest.mark.parametrize(
  "write, options, words",
  [*ARRAYS, *PIXELS, *TIMM, *OPENCLIP, *HF],
  ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_file_is_refused(tmp_path, write, options, words):
  text = message(write(tmp_path), **options)
  assert all(word in text for word in words), text
  lines = text.splitlines()
  assert len(set(lines)) == len(lines)  # nothing is said twice


VIT = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
TRANSFORMERS = lambda params, model: hf_classes.write(
  params, model, num_classes=5, image_size=(32, 32)
)


@pytest.mark.parametrize(
  "write, fields, words",
  [
    (timm.write, VIT | dict(pre_logits=True), ("pre_logits", "--drop_head")),
    (timm.write, VIT | dict(posemb="relative"), ("posemb", "/offsets")),
    (timm.write, dict(name="bit_v1", variant="R50x1"), ("'bit_v1'",)),
    (
      timm.write,
      MODERN | dict(distilled=True, registers=1),
      ("config.model.registers: got 1",),
    ),
    (
      timm.write_meta,
      MODERN | dict(pre_norm=True, patch_bias=False),
      ("Meta", "pre_norm: got True"),
    ),
    (openclip.write, VIT, ("expected 'modern'",)),
    (
      TRANSFORMERS,
      VIT | dict(posemb="relative", pool="map", pre_logits=True),
      ("pre_logits: got True", "posemb: got 'relative'", "pool: got 'map'"),
    ),
    (TRANSFORMERS, dict(variant="R26+S/32"), ("variant", "hybrid")),
    (TRANSFORMERS, dict(name="bit", variant="R50x1"), ("name: got 'bit'",)),
    (TRANSFORMERS, DINOV3, ("rope: got 'dinov3'", "--drop_head")),
  ],
)
def test_a_model_that_a_library_lacks_is_not_written(write, fields, words):
  model = model_config(**fields)
  params = {}
  if "depth" in fields and not (write is timm.write and "name" in fields):
    image = (32, 32)
    params = foreign.random_params(model, 5, image)
  with pytest.raises(ValueError) as e:
    write(params, model)
  assert all(word in str(e.value) for word in words), e.value


def test_a_json_file_that_is_none(tmp_path):
  config = hf_folder(tmp_path / "m") / "config.json"
  for text in ("{", "[1]"):
    config.write_text(text)
    assert str(config) in message(tmp_path / "m")


# Orbax's threads outlive for a moment the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_tree(tmp_path):
  path = tmp_path / "x"
  checkpointer.write_params(str(path), nested(our_params()), {})
  for name in ("_METADATA", "d"):
    broken = tmp_path / name
    shutil.copytree(path, broken)
    victim = broken / "params" / name
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert message(broken).startswith(f"{broken} is damaged: ")
  (path / "metadata" / "metadata").write_text("{")
  assert f"{path} is damaged: metadata/metadata: got no JSON" in message(path)


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"Hello.\n" * 20,
    b"\x89HDF\r\n\x1a\n" + bytes(99),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
    b"<!DOCTYPE html><html>404</html>",
    flax.serialization.msgpack_serialize({"params": {"a": 1}}),
    (DATA / "vit_linen_names.weights.npz").read_bytes()[:9000],
  ],
  ids="empty text hdf5 lfs html msgpack half".split(),
)
def test_other_files(tmp_path, content):
  path = tmp_path / "B_16.npz"
  path.write_bytes(content)
  is_npz = content[:2] == b"PK"
  reason = "expected a whole .npz" if is_npz else "of no known format"
  assert f"got '{path}', " in message(path) and reason in message(path)
  (tmp_path / "m").mkdir()
  (tmp_path / "m" / weight_files.WEIGHTS).write_bytes(content)
  (tmp_path / "m" / "config.json").write_text("{}")
  assert f"{tmp_path}/m/model.safetensors" in message(tmp_path / "m")


def test_files_whose_use_is_unclear(tmp_path):
  """Parts without an index, and two files where one is expected."""
  folder = hf_folder(tmp_path / "m")
  file = folder / "model.fp16.safetensors"
  (folder / weight_files.WEIGHTS).rename(file)
  assert vit_jax.load(folder, verbose=False).num_classes == 11
  shutil.copy(file, folder / "other.safetensors")
  text = message(folder)
  assert "model.fp16.safetensors" in text and "other.safetensors" in text
  for i in (1, 2):
    shutil.copy(file, folder / f"model-0000{i}-of-00002.safetensors")
  assert safetensors_file.INDEX.rpartition(".")[0] in message(folder)


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


@pytest.fixture
def pickled(tmp_path):
  """Bytes that make a file when they are unpickled, by protocol."""
  trace = tmp_path / "was_here"
  payloads = [pickle.dumps(Touch(trace), i) for i in (0, 2, 5)]
  yield payloads
  assert not trace.exists()
  pickle.loads(payloads[-1])
  assert trace.exists()  # it would have been there


def test_a_pickle_is_never_run(tmp_path, pickled):
  for payload in pickled:
    for name in ("model.pkl", "x.npz", "x.safetensors"):
      (tmp_path / name).write_bytes(payload)
      assert "of no known format" in message(tmp_path / name)
  objects = np.array([Touch(tmp_path / "was_here")], object)
  text = message(save(tmp_path / "x.npz", head__bias=objects))
  assert "head/bias" in text and "pickled" in text


@pytest.mark.slow  # it imports torch
def test_a_pickle_in_a_file_of_torch_is_never_run(tmp_path, pickled):
  path = tmp_path / "model.pth"
  with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes it
    archive.writestr("model/data.pkl", pickled[1])
    archive.writestr("model/data/0", bytes(64))
  # The sentence depends on whether torch is installed.
  assert f"got '{path}', " in message(path) and "orch" in message(path)
  (tmp_path / "config.json").write_text("{}")
  path.rename(tmp_path / "pytorch_model.bin")
  assert "pytorch_model.bin', " in message(tmp_path)


FSDP = "_fsdp_wrapped_module."
INNER = "._fsdp_wrapped_module._checkpoint_wrapped_module"
# Expression in a name -> what is there in the file.
WRAPPERS = {
  "module": ("^", "module."),
  "teacher": ("^", "teacher.backbone."),
  "trunk": ("^", "visual.trunk."),
  "chunks of DINOv2": (r"blocks\.(\d)", r"blocks.\1.\1"),
  "torch.compile": (r"proj\.", "_orig_mod.proj."),
  "FSDP": (r"^|(?<=blocks\.\d)", lambda m: INNER if m.start() else FSDP),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_around_a_model_are_taken_off(tmp_path, kind):
  path = tmp_path / "x.safetensors"
  arrays = timm.write(our_params(), MODEL)
  arrays = {re.sub(*WRAPPERS[kind], name): a for name, a in arrays.items()}
  safetensors_file.write(path, arrays, {})
  read = weights.read(path, options={"num_heads": 4})
  weight_files.assert_same(read, our_params())
  assert any(text in str(read.notes) for text in ("taken o", "chunks"))


def test_arrays_beside_a_wrapped_model():
  names = ["patch_embed.proj.weight", "blocks.0.norm1.weight"]

  def without(*names):
    return key_prefixes.without({n: lazy(ones(3)) for n in names})

  teacher = [f"teacher.backbone.{n}" for n in names]
  known = ["teacher.dino_head.mlp.0.weight", "logit_scale", "text.ln.weight"]
  arrays, (note,) = without(*teacher, *known)
  assert list(arrays) == names and "teacher.dino_head" in note
  with pytest.raises(ValueError, match="beside .teacher"):
    without(*teacher, "fc.weight")
  student = [f"student.backbone.{n}" for n in names]
  _, (note,) = without(*teacher, *student, "student.dino_head.weight")
  assert "'teacher.backbone.' was taken" in note and "'student.backbone" in note
  both = [f"a.{n}" for n in names] + [f"b.{n}" for n in names]
  with pytest.raises(ValueError, match="'a.', 'b.'"):
    without(*both)
  assert without(*names, "head.weight")[1] == ()

"""Files and models that do not fit are refused: the option and the reason.

A row of the tables is a file, options of `vit_jax.load` with it, and words that
the message must have: the file, array or option, and one key word. Damaged
files are in test_containers.py.
"""

import re
import shutil

import foreign
import numpy as np
import pytest
import series_parts
import weight_files
from weight_files import (
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
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy
from vit_jax.zoo.files import hf_classes, key_prefixes, openclip, timm

VIT = weight_files.SIZE
DENSE = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
MODERN = dict(name="modern", **VIT)
DINOV3 = VIT | series_parts.DINOV3
REGISTERS = VIT | series_parts.REGISTERS
BIT = dict(name="bit", variant="R50x0.5", stage_blocks=(1, 1))
HEADS = {"num_heads": 4}
OURS = {"model": to_dict(MODEL), "image_size": [32, 32], "grid": [4, 4]}


def ones(*shape):
  return np.ones(shape, "f")


# A file is a function of a folder, which returns the path.


def npz(**changes):
  return lambda folder: save(folder / "x.npz", **changes)


def tree(**more):
  return lambda folder: orbax(folder / "tree", nested(our_params()) | more)


def unknown(suffix):
  """A file, or a tree, of arrays of another kind of network."""

  def write(folder):
    path, arrays = folder / f"x{suffix}", {"conv1": ones(7, 7, 3, 64)}
    if suffix == ".npz":
      np.savez(path, **arrays)
    elif suffix:
      weight_files.write(path, arrays)
    else:
      orbax(path, arrays)
    return path

  return write


def of_hf(changes=None, about=None, **config):
  return lambda folder: hf_folder(
    folder / "m", changes=changes, about=about, **config
  )


def of_timm(about=None, changes=None, metadata=None, **fields):
  model = model_config(**fields) if fields else MODEL
  return lambda folder: timm_file(
    folder / "m", about, changes, metadata, model, num_classes=3
  )


def of_openclip(vision=None, changes=None, **about):
  return lambda folder: openclip_folder(folder / "m", vision, changes, **about)


def of_trunk(vision=None, changes=None, wrapper=""):
  return lambda folder: trunk_folder(folder / "m", vision, changes, wrapper)


def row(file, *words, **options):
  """Returns a file, options of `vit_jax.load`, and words of the message."""
  return file, options, words


ARRAYS = [
  row(npz(**{DENSE: np.zeros((48, 95), "f")}), DENSE, "(48, 95)"),
  row(npz(head__bias=np.full(11, np.inf, "f")), "x.npz", "head/bias", "NaN"),
  row(npz(head__bias=None), "head/bias", "fit together"),
  row(npz(head__bias=np.zeros(11, int)), "head/bias", "int64"),
  row(npz(**{POS_EMBEDDING: np.zeros(5, "f")}), "pos_embedding", "(5,)"),
  row(npz(**{POS_EMBEDDING: None}), "pos_emb", "missing", image_size=32),
  row(unknown(".npz"), "x.npz", "conv1", "no known model"),
  row(unknown(".safetensors"), "x.safetensors", "conv1", "no known model"),
  row(unknown(""), "conv1", "expected parameters of a ViT"),
  row(npz(), "depth: got 4", "arrays", depth=4),
  row(lambda folder: folder / "none.npz", "none.npz", "does not exist"),
  row(lambda folder: folder, "got '", "no checkpoint in it"),
  row(tree(more=[ones(3)]), "tree", "'more'", "no array"),
]
# What `mean` and `std` cannot be.
PIXELS = [
  row(npz(), "mean: got 'imagnet'", mean="imagnet", std=1),
  row(npz(), "mean, std: got 0.5, None", mean=0.5),
  row(npz(), "std: got 0", mean=0.5, std=0),
  row(npz(), "mean: got '123.7,", mean="123.7,116.3,103.5", std="58.4,57,57"),
  row(npz(), "channels", mean=(0.5, 0.4), std=0.5),
]
# Arguments in timm's config.json that belong to another model.
ARGUMENTS = {"act_layer": "silu", "depth": 3, "qk_norm": True, "window": 7}
TIMM = [
  row(of_timm(), "num_heads"),
  row(of_timm(), "num_heads=7", num_heads=7),
  *(
    row(of_timm({"model_args": HEADS | {key: value}}), f"model_args.{key}: got")
    for key, value in ARGUMENTS.items()
  ),
  row(of_timm({"model_args": HEADS, "problem_type": "x"}), "problem_type: got"),
  row(of_timm({"architecture": "vit_b_rpn_224.sw"}), "vit_b_rpn_224.sw"),
  row(of_timm({"mean": [0.4] * 3, "std": [0.5] * 3}, **BIT), "0.4", "0.5"),
  row(of_timm({"model_args": {"output_stride": 16}}, **BIT), "output_stride"),
  row(of_timm({"architecture": "vit_rope_x"}, **DINOV3), "vit_rope_x", **HEADS),
  row(of_timm(None, {"cls_token": None}, **DINOV3), "_rope_", **HEADS),
  # No table does not mean DINOv3.
  row(of_timm(**REGISTERS, posemb="none"), "position table", **HEADS),
  row(of_timm(None, {"pos_embed": ones(1)}), "pos_embed: got shape", **HEADS),
  row(of_timm(None, {"blocks.0.q_norm.x": ones(4)}), "blocks.0.q_nor", **HEADS),
  *(  # our own header
    row(of_timm(metadata={"vit_jax": OURS | changes}), *words)
    for changes, *words in (
      ({"model": to_dict(MODEL) | {"depth": 999}}, "depth: got 999"),
      ({"image_size": [36, 32]}, "36 x 32", "multiples"),
      ({"class_names": [1]}, "class_names: got 1"),
    )
  ),
]
VISION = f"{openclip.CONFIG}: model_cfg.vision_cfg."
OPENCLIP = [
  row(of_openclip({"pool_type": "none"}), f"{VISION}pool_type: got 'none'"),
  row(of_openclip({"head_width": 5}), f"{VISION}head_width: got 5"),
  row(of_openclip({"no_ln_pre": True}), f"{VISION}no_ln_pre: got True"),
  row(of_openclip({}, {"visual.positional_embedding": None}), "pos_embedding"),
  row(of_openclip(preprocess_cfg={"size": "big"}), "size: got 'big'"),
  row(of_trunk({"timm_pool": "tok"}), "timm_pool: got 'tok'", **HEADS),
  row(
    of_trunk({}, {"visual.head.proj.weight": ones(8, 48)}, "module."),
    *("module.visual.head.proj.weight", "layers"),
    **HEADS,
  ),
]
SEVERAL = {
  "vit.pooler.dense.weight": ones(48, 48),
  "vit.encoder.layer.0.q_norm.weight": ones(48),
  "vit.encoder.layer.0.output.dense.weight": ones(48),
}
PROCESSOR = "preprocessor_config.json"
HF = [
  row(of_hf(model_type="dinov5"), "model_type: got 'dinov5'"),
  row(of_hf(num_hidden_layers=3), "num_hidden_layers: got 3"),
  row(of_hf(patch_size=[16, 8]), "patch_size: got [16, 8]"),
  row(of_hf(problem_type="x"), "problem_type: got 'x'"),
  row(  # all of it in one error
    of_hf(SEVERAL, hidden_act="relu", pooler_act="relu"),
    *("hidden_act: got 'relu'", "pooler_act: got 'relu'", "layer.0.q_norm"),
    *("layer.0.output.dense.weight: got shape (48,)", "pooler and classifier"),
  ),
  row(of_hf({"vit.embeddings.position_embeddings": None}), "pos_embedding"),
  row(of_hf({"decoder2": ones(3)}), "arrays that no model", "decoder2"),
  row(of_hf(about={"size": "224"}), PROCESSOR, "size: got '224'"),
  row(of_hf(about={"rescale_factor": 0}), PROCESSOR, "rescale_factor: got 0"),
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
  if "depth" in fields:  # which are small
    params = foreign.random_params(model, 5, (32, 32))
  with pytest.raises(ValueError) as e:
    write(params, model)
  assert all(word in str(e.value) for word in words), e.value


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
  arrays = timm.write(our_params(), MODEL)
  arrays = {re.sub(*WRAPPERS[kind], name): a for name, a in arrays.items()}
  path = weight_files.write(tmp_path / "x.safetensors", arrays)
  read = weights.read(path, options=HEADS)
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
  both = [f"a.{n}" for n in names] + [f"b.{n}" for n in names]
  with pytest.raises(ValueError, match="'a.', 'b.'"):
    without(*both)

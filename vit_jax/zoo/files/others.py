"""Files of other programs: recognised, with an error that says what to do."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.config import json_file

# Kinds of files, by their first bytes.
CONTENTS = (
  (
    rb"\x80[\x02-\x05]",
    "is a pickle, which may run any code and is never loaded; save it as"
    " .safetensors where it comes from",
  ),
  (rb"\x89HDF", "is HDF5 (Keras); save the weights as .npz"),
  (rb"version https://git-lfs", "is a pointer of git-lfs; run git lfs pull"),
  (
    rb"\s*<\?xml[^>]*>\s*<net\b",
    "is a graph of OpenVINO; take the weights it was made of",
  ),
  (
    rb"(?i)\s*<(!doctype|html|\?xml)",
    "is a web page (HTML), not weights: the download failed; fetch it again",
  ),
  (
    rb"\x1f\x8b|BZh|\xfd7zXZ|.{257}ustar",
    "is an archive (tar, gzip, ...); unpack it, and give what is in it",
  ),
  (rb"GGUF", "is GGUF (llama.cpp); take the model's .safetensors"),
  (rb".{4}TFL3", "is TensorFlow Lite; take the weights it was made of"),
  (rb"\x93NUMPY", "is a single array (.npy), not a .npz or .safetensors"),
  (
    # A map whose keys are names: of one byte length, or longer.
    rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[A-Za-z_]",
    "is msgpack (flax.serialization). Save it as .npz:"
    " tree = flax.serialization.msgpack_restore(open(SRC, 'rb').read());"
    " np.savez(DST, **flax.traverse_util.flatten_dict(tree.get('params', tree),"
    " sep='/')). Hugging Face's flax_model.msgpack has other names: see there",
  ),
  (
    rb"\x08[\x01-\x20]",
    "looks like ONNX, Core ML or a SavedModel (protobuf); take the weights it"
    " was made of",
  ),
)


def kind_of(head: bytes) -> str | None:
  """Returns what a file is, by its first 512 bytes, or None."""
  programs = (
    what for start, what in CONTENTS if re.match(start, head, re.DOTALL)
  )
  return next(programs, None)


# End of the name of a zip without .npy in it -> what it is.
ZIPS = {
  ".keras": "is HDF5 of Keras in a zip; save the weights as .npz",
  ".pt2": "is a program of torch.export; save its arrays:"
  " torch.save(torch.export.load(SRC).state_dict, DST)  # DST: a .pth",
}

ADAPTER = "adapter_model.safetensors"
# Files in a folder of a model without model.safetensors, or patterns of them ->
# what can be done.
_FILES = (
  (
    ADAPTER,
    "an adapter (of peft) without its adapter_config.json; put that beside it",
  ),
  (
    "adapter_model.bin",
    f"a pickle of an older peft; save it as {ADAPTER}: d = torch.load(SRC,"
    " map_location='cpu', weights_only=True); safetensors.torch.save_file({k:"
    " v.contiguous() for k, v in d.items()}, DST)",
  ),
  (
    "flax_model.msgpack",
    "msgpack of Flax; expected model.safetensors, with transformers 4:"
    " ViTModel.from_pretrained(SRC, from_flax=True).save_pretrained(DST)",
  ),
  (
    "tf_model.h5",
    "HDF5 of Keras; expected model.safetensors, with transformers 4:"
    " ViTModel.from_pretrained(SRC, from_tf=True).save_pretrained(DST)",
  ),
  (
    "model.onnx",
    "a graph without the names of a model; take the weights it was made of",
  ),
  ("saved_model.pb", "a SavedModel of TensorFlow; save the weights as .npz"),
  ("*ckpt*.index", "a checkpoint of TensorFlow; save the weights as .npz"),
  ("openvino_model.*", "of OpenVINO; take the weights it was made of"),
  ("group1-shard*", "of TensorFlow.js; take the weights it was made of"),
  ("Data/com.apple.CoreML", "of Core ML; take the weights it was made of"),
)


_SUFFIXES = ".bin .h5 .keras .mlmodel .msgpack .npz .onnx .pt .pt2 .pth".split()


def of_folder(folder: epath.Path) -> str | None:
  """Returns why there are no weights in another program's folder, or None."""
  for pattern, what in _FILES:
    if found := sorted(folder.glob(pattern)):
      return f"got {str(folder)!r} with {found[0].name}, {what}."
  if (folder / "snapshots").is_dir():
    names = sorted(p.name for p in (folder / "snapshots").iterdir())
    owner = folder.name.removeprefix("models--").replace("--", "/")
    return (
      f"got {str(folder)!r}, the root of a model in a hub's cache, expected one"
      f" of its snapshots: {', '.join(f'snapshots/{n}' for n in names)}; or"
      f" hf-hub:{owner}."
    )
  if models := sorted(p.name for p in folder.glob("models--*")):
    owner = models[0].removeprefix("models--").replace("--", "/")
    return (
      f"got {str(folder)!r}, a hub's cache of {len(models)} models, expected"
      f" one of them: hf-hub:{owner}, ..., or the path of a snapshot in"
      f" {models[0]}."
    )
  steps = [p.name.partition("-")[2] for p in folder.glob("checkpoint-*")]
  if numbers := [int(step) for step in steps if step.isdecimal()]:
    return (
      f"got {str(folder)!r}, the folder of a run of transformers' Trainer,"
      f" expected one of its checkpoints; the newest is"
      f" {folder / f'checkpoint-{max(numbers)}'}."
    )
  files = [p.name for p in folder.iterdir() if p.suffix in _SUFFIXES]
  if files and not (folder / "checkpoints").exists():
    return (
      f"got {str(folder)!r} with {', '.join(sorted(files)[:9])}, expected the"
      " path of one file."
    )
  config = json_file.read(folder / "config.json")  # a run of ours has one, too
  is_others = "model_type" in config or "architecture" in config
  if is_others and not any(folder.glob("*.safetensors")):
    return (
      f"got {str(folder)!r} with a config.json and without weights beside it,"
      " expected model.safetensors."
    )
  return None


# Arrays that bitsandbytes, GPTQ and AWQ write beside their integers.
_QUANTISED = re.compile(r".*\.(absmax|SCB|qweight|qzeros)$")


def refuse_quantised(names: Iterable[str]) -> None:
  """Raises ValueError if arrays are of a quantised model."""
  if found := next(filter(_QUANTISED.match, names), None):
    raise ValueError(
      f"got {found!r}, of a quantised model (bitsandbytes, GPTQ, AWQ), expected"
      " floating point; take the model that was quantised, or with"
      " transformers: model.dequantize().save_pretrained(DST)."
    )


class Family(NamedTuple):
  """A model of another library.

  name: The library and the model.
  arrays: Regular expressions; each matches a name of its arrays.
  advice: What to do.
  """

  name: str
  arrays: tuple[str, ...]
  advice: str = "vit_jax has no such model"


# The first one whose arrays are all there names the file.
FAMILIES = (
  Family(
    "an adapter of peft (LoRA)",
    (r"\.lora_[AB]\.",),
    "Give its folder, with adapter_config.json in it",
  ),
  Family(
    "torchvision's ViT",
    (
      r"(^|\.)conv_proj\.weight$",
      r"(^|\.)encoder\.layers\.encoder_layer_0\.",
    ),
    "Use the same model from timm (vit_base_patch16_224, ...), or rename the"
    " arrays as timm does",
  ),
  Family(
    "a ResNet of torchvision or timm with BatchNorm",
    (r"(^|\.)layer1\.0\.conv1\.weight$", r"running_mean$"),
    "vit_jax's ResNets have GroupNorm: BiT (resnetv2_*_bit)",
  ),
  Family(
    "a CLIP whose image tower is a ResNet",
    (r"(^|\.)visual\.layer1\.0\.conv1\.weight$",),
    "vit_jax has no ResNet with BatchNorm: use a CLIP with a ViT",
  ),
  Family(
    "SAM",
    (r"(^|\.)rel_pos_h$",),
    "It is a ViT with attention in windows, which vit_jax does not have",
  ),
  Family("Swin", (r"relative_position_bias_table$", r"layers\.0\.blocks\.0\.")),
  Family(
    "ConvNeXt",
    (r"stages\.\d+\.(\w+\.)?\d+\.(dwconv|conv_dw|depthwise)\w*\.weight$",),
  ),
  Family("Keras or TensorFlow", (r":0$|/kernel:0",)),
)


def family_of(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
  """Returns the model that some arrays belong to, or None.

  Args:
    names: Names of the arrays.
    config: Contents of the config.json beside them; {} without such a file.
  """
  names = list(names)
  stated = config.get("model_type") or config.get("architecture")
  also = f" (config.json: {str(stated)[:60]})" if stated else ""
  for family in FAMILIES:
    if all(any(re.search(r, n) for n in names) for r in family.arrays):
      return f"the arrays are those of {family.name}{also}. {family.advice}"
  return f"config.json names {str(stated)[:60]!r}" if stated else None

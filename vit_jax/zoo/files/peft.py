"""LoRA adapters of peft: adapter_model.safetensors and adapter_config.json.

The arrays of a linear map are `<module>.lora_A.weight` [r, in] and
`<module>.lora_B.weight` [out, r], after "base_model.model.". Modules have their
names in memory: since transformers 5 these differ from the names in its files,
and adapters of transformers 4 have the older ones. timm's fused `qkv` has one
A, and a B of three parts.

Source: peft 0.21, tuners/lora/config.py, utils/save_and_load.py.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.config import json_file
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import lora, lora_base
from vit_jax.finetune.lora_base import Factors
from vit_jax.paths import file_in, is_remote
from vit_jax.weights import download
from vit_jax.weights.safetensors_file import open_safetensors
from vit_jax.weights.weights_file import LazyArray, Weights, shorten

ARRAYS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Initialisations of the factors (`init_lora_weights`) that do not change the
# base. The others subtract a part from its kernels, which no adapter file has.
INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
TEXTS = "text_model."  # in the names of a second tower's modules
PREFIX = "base_model.model."
HEADS = r"(?:classifier|head)\.(weight|bias)"
_BLOCK = (
  r"(?:.*\.)?(?:layers?|blocks|resblocks)\.(\d+)\.(.+)\.lora_([AB])\.weight"
)
_IN = "(attention|self_attn|attn)."
_ATTENTION, _MLP = "MultiHeadDotProductAttention_0", "MlpBlock_0"
# Modules of a block -> ours; transformers 5, transformers 4, SigLIP and CLIP,
# timm, DINOv3.
MODULES = {
  f"{_IN}q_proj|attention.attention.query": f"{_ATTENTION}/query",
  f"{_IN}k_proj|attention.attention.key": f"{_ATTENTION}/key",
  f"{_IN}v_proj|attention.attention.value": f"{_ATTENTION}/value",
  f"{_IN}(o_proj|out_proj|proj|output.dense)": f"{_ATTENTION}/out",
  "mlp.(fc1|up_proj)|intermediate.dense": f"{_MLP}/Dense_0",
  "mlp.(fc2|down_proj)|output.dense": f"{_MLP}/Dense_1",
  "mlp.gate_proj": f"{_MLP}/Gate",
}
FUSED = r"attn\.qkv"
# Class of transformers 5 -> its blocks, as they are named in memory.
CLASSES = {
  "ViTForImageClassification": "vit.layers",
  "IJepaForImageClassification": "ijepa.layers",
  "DeiTForImageClassification": "deit.layers",
  "Dinov2ForImageClassification": "dinov2.encoder.layer",
  "Dinov2WithRegistersForImageClassification": (
    "dinov2_with_registers.encoder.layer"
  ),
  "DINOv3ViTModel": "model.layer",
}
# Ours -> modules of a block there.
WRITTEN = {
  f"{_ATTENTION}/query": "attention.q_proj",
  f"{_ATTENTION}/key": "attention.k_proj",
  f"{_ATTENTION}/value": "attention.v_proj",
  f"{_ATTENTION}/out": "attention.o_proj",
  f"{_MLP}/Dense_0": "mlp.fc1",
  f"{_MLP}/Dense_1": "mlp.fc2",
}
# The same of an MLP with a gate, and of DINOv3's.
PROJECTIONS = {
  f"{_MLP}/Dense_0": "mlp.up_proj",
  f"{_MLP}/Dense_1": "mlp.down_proj",
  f"{_MLP}/Gate": "mlp.gate_proj",
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
  """Contents of adapter_config.json, with peft's defaults."""

  peft_type: str = "LORA"
  base_model_name_or_path: str | None = None
  revision: str | None = None
  lora_alpha: float = 8.0
  use_rslora: bool = False
  use_dora: bool = False
  lora_bias: bool = False
  fan_in_fan_out: bool = False
  init_lora_weights: Any = True
  alpha_pattern: dict = dataclasses.field(default_factory=dict)


def read(folder: epath.Path, read_base: Callable[[str], Weights]) -> Weights:
  """Reads an adapter and its base, and merges them in float32.

  Args:
    folder: Its folder.
    read_base: `weights.read`.

  Raises:
    FileNotFoundError: The base does not exist, or cannot be downloaded.
    ValueError: It is not a LoRA of the blocks' linear maps, or belongs to
      another base.
  """
  where = str(folder / CONFIG)
  config = json_file.build(
    AdapterConfig, json_file.read(file_in(folder, CONFIG)), where
  )
  _check(config, where)
  arrays, _ = open_safetensors(file_in(folder, ARRAYS))
  name = _base(folder, config)
  try:
    base = read_base(name)
  except FileNotFoundError as e:
    raise FileNotFoundError(f"{where}: base_model_name_or_path: {e}") from None
  texts = [name for name in arrays if TEXTS in name]
  factors, heads = _ours(
    {k: v for k, v in arrays.items() if k not in texts}, config, base
  )
  if heads:
    base = _without_head(base, heads)
  else:
    heads = {k: v for k, v in base.params.items() if ViTConfig.is_head(k)}
  notes = (*base.notes, f"the adapter {folder} is merged into {name}.")
  if texts:
    notes += (f"left out: {shorten(texts)}, which only texts need.",)
  return dataclasses.replace(
    base,
    path=str(folder),
    params=lora_base.merged(base.params, factors, ViTConfig) | heads,
    notes=notes,
  )


def _without_head(base: Weights, heads: Mapping[str, LazyArray]) -> Weights:
  """Returns a base for a head of the adapter's.

  It has no tanh layer, which no classifier uses, and no names and loss of other
  classes.

  Raises:
    ValueError: The classifier uses another input than the base computes.
  """
  params, old = base.params, base.params.get("head/kernel")
  parts = {"MAPHead_0/probe", "Transformer/pre_norm/scale"} & params.keys()
  if base.format == "hf" and parts and old is None:
    raise ValueError(
      f"{ARRAYS}: got a classifier for CLIP or SigLIP, which sees the mean of"
      f" the patches, expected none: {base.path} has none."
    )
  new = heads.get("head/kernel")
  if old is None or new is None or old.shape[-1] != new.shape[-1]:
    base = dataclasses.replace(base, class_names=None, loss=None)
  params = lora_base.without_pre_logits(params)
  return dataclasses.replace(base, params=params)


def _check(config: AdapterConfig, where: str) -> None:
  unlike = {
    "peft_type": config.peft_type != "LORA",
    "use_dora": config.use_dora,
    "lora_bias": config.lora_bias,
    "fan_in_fan_out": config.fan_in_fan_out,
    "init_lora_weights": config.init_lora_weights not in INITS,
    "alpha_pattern": bool(config.alpha_pattern),
  }
  if wrong := [
    f"{k}={getattr(config, k)!r}" for k, is_other in unlike.items() if is_other
  ]:
    raise ValueError(
      f"{where}: got {', '.join(wrong)}, expected a plain LoRA; merge it with"
      " peft's merge_and_unload."
    )


def _base(folder: epath.Path, config: AdapterConfig) -> str:
  """Returns the path or the address of a base."""
  if not (name := config.base_model_name_or_path):
    raise ValueError(f"{folder / CONFIG}: got no base_model_name_or_path.")
  if is_remote(name) or download.is_remote(name) or epath.Path(name).exists():
    return name
  if (folder / name).exists():
    return str(folder / name)
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    return name
  at = f"@{config.revision}" if config.revision else ""
  return f"{download.HUB}{name}{at}"


def _ours(
  arrays: Mapping[str, LazyArray], config: AdapterConfig, base: Weights
) -> tuple[dict[str, Factors], dict[str, LazyArray]]:
  """Returns path of a linear map -> its factors; and the arrays of a head.

  Raises:
    ValueError: There are arrays of other modules, or of other shapes.
  """
  pairs: dict[str, dict[str, np.ndarray]] = {}
  heads, unknown = {}, []
  for name, array in arrays.items():
    theirs = name.removeprefix(PREFIX)
    if match := re.fullmatch(rf"(?:.*\.)?{HEADS}", theirs):
      if match[1] == "weight":
        array = array.then(array.shape[::-1], np.transpose)
      heads[{"weight": "head/kernel", "bias": "head/bias"}[match[1]]] = array
    elif (match := re.fullmatch(_BLOCK, theirs)) and (maps := _maps(match[2])):
      value, kind = np.asarray(array, np.float32), match[3]
      parts = [value] * len(maps)
      if kind == "B":  # parts that are not equal are an error below
        parts = np.array_split(value, len(maps))
      for ours, part in zip(maps, parts, strict=True):
        path = f"{ViTConfig.BLOCKS.format(match[1])}/{ours}"
        if pairs.setdefault(path, {}).setdefault(kind, part) is not part:
          unknown.append(name)  # of another model in the file
    else:
      unknown.append(name)
  unpaired = [path for path, part in pairs.items() if len(part) < 2]
  if unknown or unpaired or not pairs:
    some = shorten(sorted(unknown or unpaired) or ["no factors"])
    raise ValueError(f"{ARRAYS}: got {some}, expected lora_A and lora_B.")
  factors = {}
  for path, part in pairs.items():
    rank = len(part["A"])
    scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
    kernel = base.params.get(f"{path}/kernel")
    if kernel is None:
      raise ValueError(f"{ARRAYS}: got {path}, which the base does not have.")
    inputs = lora.num_inputs(path, ViTConfig)
    sides = math.prod(kernel.shape[:inputs]), math.prod(kernel.shape[inputs:])
    shapes = (rank, sides[0]), (sides[1], rank)
    if (part["A"].shape, part["B"].shape) != shapes:
      raise ValueError(
        f"{ARRAYS}: got factors {part['A'].shape} and {part['B'].shape} of"
        f" {path}, expected {shapes[0]} and {shapes[1]}."
      )
    a = part["A"].T.reshape(*kernel.shape[:inputs], rank)
    b = part["B"].T.reshape(rank, *kernel.shape[inputs:])
    factors[path] = Factors(a, b, scale)
  return factors, heads


def _maps(module: str) -> list[str]:
  """Returns the linear maps of ours that a module of a block contains."""
  if re.fullmatch(FUSED, module):
    return [f"{_ATTENTION}/{name}" for name in ("query", "key", "value")]
  return [ours for name, ours in MODULES.items() if re.fullmatch(name, module)]


def write(
  factors: Mapping[str, Factors],
  head: Mapping[str, np.ndarray],
  base: str,
  kind: str = "ViTForImageClassification",
  has_gate: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns the arrays of an adapter for transformers 5, and its config.

  Args:
    factors: Path of a linear map -> its factors.
    head: Arrays of the head by our names; {} without a head.
    base: Path or address of the base.
    kind: A name of `CLASSES`.
    has_gate: Whether its MLP has a gate.

  Returns:
    Name in adapter_model.safetensors -> array; contents of adapter_config.json.
  """
  names = WRITTEN
  if has_gate or kind == "DINOv3ViTModel":
    names = WRITTEN | PROJECTIONS
  arrays, targets = {}, set()
  for path, (a, b, _) in factors.items():
    _, _, ours = path.split("/", 2)
    number, rank = ViTConfig.block_of(path), a.shape[-1]
    targets.add(names[ours].rpartition(".")[2])
    name = f"{PREFIX}{CLASSES[kind]}.{number}.{names[ours]}"
    for key, matrix in (
      ("A", a.reshape(-1, rank).T),
      ("B", b.reshape(rank, -1).T),
    ):
      arrays[f"{name}.lora_{key}.weight"] = np.ascontiguousarray(matrix)
  if head:
    kernel = np.ascontiguousarray(np.transpose(head["head/kernel"]))
    arrays[f"{PREFIX}classifier.weight"] = kernel
    arrays[f"{PREFIX}classifier.bias"] = np.asarray(head["head/bias"])
  some = next(iter(factors.values()))
  rank = some.a.shape[-1]
  revision = ""
  if base.startswith(download.HUB):
    base, _, revision = base.removeprefix(download.HUB).partition("@")
  config = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": base,
    "revision": revision or None,
    "r": rank,
    "lora_alpha": some.scale * rank,
    "target_modules": sorted(targets),
    "modules_to_save": ["classifier"] if head else None,
    "bias": "none",
    "lora_dropout": 0.0,
    "use_rslora": False,
    "inference_mode": True,
  }
  return arrays, config

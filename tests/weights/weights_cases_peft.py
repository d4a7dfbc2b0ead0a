"""LoRA adapters of peft on small models of transformers and timm."""

import functools
import json
import pathlib
import re
from typing import Any

import numpy as np
import torch_libraries
import weights_cases_hf
import weights_cases_timm
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file
from weights_table import Case, Theirs

from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import to_dict
from vit_jax.families.vit import ViTConfig
from vit_jax.finetune import lora
from vit_jax.weights import normalisation, source_file
from vit_jax.zoo.files import hf_names
from vit_jax.zoo.files import peft as ours

peft = torch_libraries.Later("peft")
transformers = torch_libraries.Later("transformers")
RANK, ALPHA = 3, 5.0
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
# Class of transformers -> options of its config, linear maps with factors.
MODELS = {
  "ViTForImageClassification": (weights_cases_hf.SQUARE, ALL),
  "Dinov2WithRegistersForImageClassification": (
    weights_cases_hf.DINOV2,
    ("q_proj", "o_proj", "fc1", "fc2"),
  ),
  "DINOv3ViTModel": (
    weights_cases_hf.DINOV3 | weights_cases_hf.GATED,
    ("q_proj", "o_proj", "up_proj", "down_proj", "gate_proj"),
  ),
}
# Module in a block -> ours.
NAMES = {
  theirs: name
  for names in (ours.WRITTEN, ours.PROJECTIONS)
  for name, theirs in names.items()
}


def adapt(model: Any, base: pathlib.Path, folder: pathlib.Path, **options):
  """Puts random factors into a model; saves them, and the name of the base."""
  model.name_or_path = str(base)
  config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **options)
  adapted = peft.get_peft_model(model, config)
  for name, leaf in adapted.named_parameters():
    if "lora_" in name:
      leaf.data.normal_(0, 0.2)
  adapted.save_pretrained(folder)


def of_transformers(name: str, use_rslora: bool = False) -> Theirs:
  options, targets = MODELS[name]
  model = weights_cases_hf.make(name, options)
  heads = ["classifier"] if "ForImage" in name else None

  def save(folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder / "base")
    adapt(
      model,
      folder / "base",
      folder / "adapter",
      target_modules=list(targets),
      modules_to_save=heads,
      use_rslora=use_rslora,
    )
    return folder / "adapter"

  outputs = functools.partial(weights_cases_hf.outputs, model, _pixels(model))
  run = functools.partial(as_run, model)
  return Theirs(save, outputs, reload, None if use_rslora else run)


def _pixels(model: Any) -> normalisation.Pixels:
  family = hf_names.known(model.config.model_type)
  return normalisation.NAMED[family.pixels or "half"]


def as_run(model: Any, folder: pathlib.Path, vit) -> pathlib.Path:
  """Writes the factors and the head as a checkpoint of a run of ours."""
  flat = flatten_dict(vit.params, sep="/")
  params = {k: np.asarray(v) for k, v in flat.items() if "head" in k}
  for name, module in model.named_modules():
    if not hasattr(module, "lora_A"):
      continue
    number, module_name = re.search(r"layers?\.(\d+)\.(.+)", name).groups()
    path = f"Transformer/encoderblock_{number}/{NAMES[module_name]}"
    shape = flat[f"{path}/kernel"].shape
    inputs = lora.num_inputs(path, ViTConfig)
    a, b = (
      getattr(module, key)["default"].weight.detach().numpy().T
      for key in ("lora_A", "lora_B")
    )
    params[f"{path}/lora_a"] = a.reshape(*shape[:inputs], RANK)
    params[f"{path}/lora_b"] = b.reshape(RANK, *shape[inputs:])
  base = weights.read(folder / "base")
  config = {
    "model": to_dict(vit.config), "lora": {"rank": RANK, "alpha": ALPHA}
  }  # fmt: skip
  metadata = {
    "config": config,
    "image_size": [*vit.image_size],
    "grid": [*vit.config.grid(vit.image_size)],
    "base": source_file.of_weights(base, None)._asdict(),
  }
  checkpointer.write_params(
    str(folder / "run"), unflatten_dict(params, sep="/"), metadata
  )
  return folder / "run"


def reload(path: str) -> Theirs:
  """Returns peft's model of what we wrote."""
  about = json.loads((pathlib.Path(path) / ours.CONFIG).read_text())
  base = pathlib.Path(about["base_model_name_or_path"])
  (name,) = json.loads((base / "config.json").read_text())["architectures"]
  model = getattr(transformers, name).from_pretrained(base)
  peft.PeftModel.from_pretrained(model, path)
  return Theirs(
    None,
    functools.partial(weights_cases_hf.outputs, model.eval(), _pixels(model)),
  )


def of_timm() -> Theirs:
  """Its attention has one A for query, key and value."""
  model = weights_cases_timm.created(
    "vit_base_patch16_224", **weights_cases_timm.small(dynamic_img_size=True)
  )

  def save(folder: pathlib.Path) -> pathlib.Path:
    base = folder / "base.safetensors"
    save_file(weights_cases_timm.arrays_of(model), base)
    adapt(
      model,
      base,
      folder / "adapter",
      target_modules=r".*attn\.(qkv|proj)",
      modules_to_save=["head"],
    )
    return folder / "adapter"

  half = normalisation.HALF
  return Theirs(
    save, lambda images: weights_cases_timm.outputs(model, images, half)
  )


def cases() -> list[Case]:
  """Returns a case for each class, one with another scale, and timm's."""
  of_hf = functools.partial(
    Case, "LoRA", "peft", sizes=weights_cases_hf.IMAGES, filter="hf"
  )
  return [
    *(
      of_hf(
        name,
        functools.partial(of_transformers, name),
        filter="bicubic" if name.startswith("Dinov2With") else "hf",
        to="peft",
      )
      for name in MODELS
    ),
    of_hf(
      "rslora",
      functools.partial(of_transformers, "ViTForImageClassification", True),
      to=None,
    ),
    Case(
      "LoRA", "peft", "timm", of_timm, weights_cases_timm.SIZES, "timm", None,
      {"num_heads": 2},
    ),
  ]  # fmt: skip

"""Fine-tuning of a ViT on photographs by one of several methods.

Arguments: path (a folder with train/CLASS, val/CLASS and test/CLASS), init
(weights), method (of METHODS, or `probe`: a linear probe in the place of the
head, without training).
"""

import dataclasses

from vit_jax.config import arguments, check_choices, defaults

RES = 42  # pixels; 3 x 3 patches
BATCH, STEPS, WARMUP = 32, 96, 10
FROZEN = (
  *("cls", "embedding/*", "Transformer/posembed_input/*"),
  "Transformer/encoderblock_[0-5]/*",
)
# Options of the optimizer. The rates were fixed before any run.
METHODS = {
  # transformers' Trainer
  "full": {"name": "adamw", "lr": 5e-5},
  "last_blocks": {"name": "adamw", "lr": 5e-5, "freeze": FROZEN},
  # MAE's ViT-B: 5e-4 for 256 images
  "layer_decay": {
    **{"name": "adamw", "lr": 6.25e-5, "weight_decay": 0.05},
    "layer_decay": 0.65,
  },
  # docs/tasks/transfer.md; rank and alpha are peft's defaults
  "lora": {"name": "adamw", "lr": 3e-3},
  # configs/folder.py
  "probe_first": {"name": "sgd", "lr": 3e-3, "clip_norm": 1.0},
}
RANK = 8


def get_config(arg: str = ""):
  args = arguments(arg, {"path": "", "init": "", "method": ""})
  check_choices(args, {"method": (*METHODS, "probe")})
  from vit_jax import weights  # only here, since it takes seconds

  method = args["method"]
  c = defaults()
  c.init = args["init"]
  model = weights.model_to_finetune(weights.read(args["init"]))
  options = dataclasses.asdict(model)
  c.model.update({k: v for k, v in options.items() if v is not None})
  c.data.dataset, c.data.split = f"folder:{args['path']}", "train"
  c.data.batch_size = BATCH
  c.data.ops = (
    f"decode(dct='accurate')|random_resized_crop({RES}, 0.08, 1.0)|flip_lr"
  )
  score = {"ops": f"decode(dct='accurate')|resize_torch({RES}, 'bicubic')"}
  score |= {"kind": "classification"}
  c.total_steps, c.log_steps = STEPS, 8
  c.checkpoint.every_steps = 0
  c.optim.schedule, c.optim.warmup_steps = "cosine", WARMUP
  if method == "probe":
    c.init_head, c.total_steps = "linear_probe", 1
    c.optim.lr, c.optim.warmup_steps = 1e-12, 0
    c.evals = {"val": {**score, "split": "val"}}
    return c
  c.optim.update(METHODS[method])
  if method == "lora":
    c.lora.rank = RANK
  c.evals = {"test": {**score, "split": "test"}}
  return c

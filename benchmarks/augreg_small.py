"""AugReg in miniature: small photographs, from scratch, in three strengths.

configs/augreg.py at the size of the demo's model: 4 blocks of width 128, and
8 x 8 patches of 4 pixels. RandAugment shifts and cuts out by pixels of an image
of 224. So the crop has 224 pixels, and is shrunk to 32 after RandAugment.

Run: vit-jax train --workdir=runs/medium1 \
  --config=benchmarks/augreg_small.py:path=/path/to/images,aug=medium1
Arguments: path (a folder with the folders train and test, which have one
sub-folder per class), aug (none, light1 or medium1), epochs.
Cost and results: benchmarks/notes/study.md.
"""

import math
import pathlib

from vit_jax.config import arguments, check_choices, recipe

ARGUMENTS = {"path": "", "aug": "medium1", "epochs": "10"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"aug": ("none", "light1", "medium1")})
  train = pathlib.Path(args["path"]) / "train"
  if not train.is_dir():
    raise ValueError(
      f"path: got {args['path']!r}, expected a folder with the folders train"
      " and test."
    )
  num_classes = sum(p.is_dir() for p in train.iterdir())

  c = recipe(
    f"augreg:dataset=imagenet2012,aug={args['aug']},epochs={args['epochs']}"
  )
  c.model.variant = "Ti/4"  # the patch; all sizes follow
  c.model.width, c.model.depth = 128, 4
  c.model.mlp_dim, c.model.num_heads = 512, 4
  c.model.pool, c.model.pre_logits = "gap", False
  c.model.dtype = "float32"
  c.model.head_bias = -math.log(num_classes)

  c.data.dataset, c.data.split = f"folder:{args['path']}", "train"
  c.data.batch_size = 128
  c.data.ops += "|resize(32)"
  c.mesh.fsdp = 1
  c.optim.warmup_steps = 300
  c.optim.microbatch = 32  # 347 instead of 294 images/s on two CPU cores
  c.checkpoint.keep_every_steps = None
  score = {"kind": "classification", "ops": "decode|resize(32)"}
  c.evals = {
    "test": {**score, "split": "test"},
    "seen": {**score, "split": "train[:5000]"},
  }
  return c

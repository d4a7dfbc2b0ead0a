"""Numbers of your own images, such as an age, from pre-trained weights.

Run: vit-jax prepare csv:labels.csv --numbers=age --name=faces
  vit-jax train --workdir=runs/age \
    --config=regression:dataset=faces,init=ViT.npz
Arguments: dataset (a name that vit-jax prepare imported with numbers), init
(anything that vit_jax.load reads; without it a small ViT from scratch), res
(pixels, a multiple of the patch; by default that of init's training, or 128).
A split `test`, else `validation`, else the last tenth of `train` is scored at
the end; a tenth of what is left of `train` is held out and scored after every
epoch as `val`. Images are padded by an eighth and cropped, and not mirrored: a
position or a direction would change.
Cost and result: docs/train.md has 2,000 drawn images of 64 px.
"""

import dataclasses
import math

from vit_jax.config import arguments, defaults, whole_number

ARGUMENTS = {"dataset": "", "init": "", "res": ""}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  if not args["dataset"]:
    raise ValueError("got no dataset, expected dataset=NAME.")
  res = whole_number(args, "res") if args["res"] else None
  # Only here, since they take seconds to import.
  from vit_jax import weights
  from vit_jax.data import sources, splits

  opened = sources.Sources()

  def has(split: str) -> bool:
    try:
      opened.inspect(args["dataset"], split)
    except splits.SplitError:
      return False
    return True

  tests = [name for name in ("test", "validation") if has(name)]
  train, val, test = "train[:90%]", "train[90%:]", "test"
  if tests:
    test = tests[0]
  else:
    train, val, test = "train[:80%]", "train[80%:90%]", "train[90%:]"
  num_images = opened.inspect(args["dataset"], train).num_examples

  c = defaults()
  c.objective = {"kind": "regression"}
  if args["init"]:
    try:
      init = weights.read(args["init"])
    except FileNotFoundError as e:
      raise ValueError(f"init: {e}") from None
    model = dataclasses.asdict(weights.model_to_finetune(init))
    c.init = args["init"]
    c.model.update({k: v for k, v in model.items() if v is not None})
    height, width = weights.trained_at(init)
    num_epochs = 20
  else:
    c.model.variant = "Ti/16"
    c.model.pool, c.model.posemb = "gap", "sincos2d"
    height = width = 128
    num_epochs = 100
  if res:
    height = width = res
  size = height if height == width else (height, width)

  c.data.dataset, c.data.split = args["dataset"], train
  pad = min(height, width) // 8
  c.data.ops = f"decode|resize({size})|pad({pad})|random_crop({size})"
  # 50 to 100 steps an epoch, as far as 8 to 128 images a step allow.
  batch = 2 ** int(math.log2(num_images / 50)) if num_images > 50 else 1
  c.data.batch_size = min(128, max(8, batch))
  epoch = math.ceil(num_images / c.data.batch_size)
  c.total_steps = num_epochs * epoch
  c.optim.name = "adamw"
  c.optim.lr = 1e-3 if not args["init"] else 3e-4
  c.optim.weight_decay = 0.1
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = c.total_steps // 10
  c.optim.clip_norm = 1.0
  c.optim.microbatch = 16  # so that a larger batch takes no more memory

  c.log_steps = max(1, epoch // 5)
  c.checkpoint.every_steps = epoch
  score = {"kind": "regression", "ops": f"decode|resize({size})"}
  c.evals = {
    "test": {**score, "split": test},
    "val": {**score, "split": val, "every_steps": epoch},
  }
  return c

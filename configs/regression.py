"""Numbers of your own images, such as an age, from pre-trained weights.

Run: vit-jax prepare csv:labels.csv --numbers=age --name=faces
  vit-jax train --workdir=runs/age \
    --config=regression:dataset=faces,init=ViT.npz
Arguments: dataset (a name that vit-jax prepare imported with numbers), init
(anything that vit_jax.load reads; without it a small ViT from scratch), res
(pixels, a multiple of the patch; by default that of init's training, or 128).
The last tenth of `train` is the test, scored once, at the end. The tenth before
it is `val`, scored every 200 steps. If the data set has a test split:
--config.evals.test.split=test. Images are not augmented, because a crop changes
positions and a mirror changes directions. If augmentation does not change your
numbers, add |flip_lr or |pad(PIXELS)|random_crop(SIZE) to config.data.ops.
Cost: 9 minutes on 2 CPU cores that other work shared, for 2,000 images of 64
px, init the demo's model of 0.8 M parameters. Result (jax 0.10.2): R2 of 0.995
and 0.960 for the area and the place of a drawn disc, see docs/data.md.
"""

import dataclasses

from vit_jax.config import arguments, defaults, whole_number

ARGUMENTS = {"dataset": "", "init": "", "res": ""}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  if not args["dataset"]:
    raise ValueError("got no dataset, expected dataset=NAME.")
  res = whole_number(args, "res") if args["res"] else None
  # Only here, since it takes seconds to import.
  from vit_jax import weights

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
    num_epochs = 20.0
  else:
    c.model.variant = "Ti/16"
    c.model.pool, c.model.posemb = "gap", "sincos2d"
    height = width = 128
    num_epochs = 100.0
  if res:
    height = width = res
  size = height if height == width else (height, width)

  c.data.dataset, c.data.split = args["dataset"], "train[:80%]"
  c.data.ops = f"decode|resize({size})"
  c.data.batch_size = 32
  c.total_epochs = num_epochs
  c.optim.name = "adamw"
  c.optim.lr = 1e-3 if not args["init"] else 3e-4
  c.optim.weight_decay = 0.1
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 20
  c.optim.clip_norm = 1.0
  c.optim.microbatch = 16  # so that a larger batch takes no more memory

  c.checkpoint.every_steps = 200
  score = {"kind": "regression", "ops": f"decode|resize({size})"}
  c.evals = {
    "test": {**score, "split": "train[90%:]"},
    "val": {**score, "split": "train[80%:90%]", "every_steps": 200},
  }
  return c

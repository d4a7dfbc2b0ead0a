"""Your own images, on one machine: a laptop's CPU is enough.

Run: vit-jax train --workdir=runs/mine \
  --config=folder:path=/path/to/images,init=ViT.npz
Arguments: path (a folder with one sub-folder a class, see docs/train.md), init
(anything that vit_jax.load reads; without it a small ViT from scratch, which
needs many more images and steps to be any good), res (pixels, a multiple of the
patch; by default that of init's training, or 128).
Model and numerics are those of init; batch and length follow from the number
of images (--config.total_epochs=3 --config.optim.warmup_steps=10 is shorter).
Nothing is chosen on the images of the test, which are scored once, at the end:
the folder `test`, or else `val`. After every epoch `val` is scored, or, where
it is the test or there is none, a tenth of `train`, which is held out.
Cost: 6 minutes on 2 CPU cores that other work shared, for 3,000 JPEGs of
500 x 375 pixels (six drawn shapes over two photographs), init the demo's model
of 0.8 M parameters, res=64. Result (jax 0.10.2): 84.3 % of 300 test images.
Other models: not yet run; vit-jax models prints the cost of an image.
"""

import dataclasses
import math
import re

from vit_jax.config import arguments, defaults, whole_number

ARGUMENTS = {"path": "", "init": "", "res": "", "budget": "5m"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  if not args["path"]:
    raise ValueError("got no path, expected path=/path/to/images.")
  res = whole_number(args, "res") if args["res"] else None
  # Only here, since they take seconds to import.
  from vit_jax import weights
  from vit_jax.data import sources, splits

  dataset = f"folder:{args['path']}"
  opened = sources.Sources()

  def has(split: str) -> bool:
    try:
      opened.inspect(dataset, split)
    except splits.SplitError:
      return False
    return True

  train, val = "train[:90%]", "train[90%:]"
  test = "test" if has("test") else "val"
  if test == "test" and has("val"):
    train, val = "train", "val"
  num_images = opened.inspect(dataset, train).num_examples

  c = defaults()
  if args["init"]:
    try:
      init = weights.read(args["init"])
    except FileNotFoundError as e:
      raise ValueError(f"init: {e}") from None
    model = dataclasses.asdict(weights.model_to_finetune(init))
    c.init = args["init"]
    c.model.update({k: v for k, v in model.items() if v is not None})
    height, width = weights.trained_at(init)
    num_epochs = 10
    c.optim.name = "sgd"  # as Table 4 of arXiv:2010.11929
    c.optim.lr = 0.03
  else:
    c.model.variant = "Ti/16"
    c.model.pool, c.model.posemb = "gap", "sincos2d"
    height = width = 128
    num_epochs = 100
    c.optim.lr = 1e-3
    c.optim.weight_decay = 0.1
  if res:
    height = width = res
  size = height if height == width else (height, width)

  c.data.dataset, c.data.split = dataset, train
  c.data.ops = f"decode_inception_crop({size})|flip_lr"
  if args["init"]:
    c.init_head = "linear_probe"
    c.data.ops = _pad_and_crop(size)
  # 50 to 100 steps an epoch, as far as 8 to 128 images a step allow.
  batch = 2 ** int(math.log2(num_images / 50)) if num_images > 50 else 1
  c.data.batch_size = min(128, max(8, batch))
  epoch = math.ceil(num_images / c.data.batch_size)
  c.total_steps = num_epochs * epoch
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = c.total_steps // 10
  c.optim.clip_norm = 1.0
  c.optim.microbatch = 16  # so that a larger batch takes no more memory

  c.log_steps = max(1, epoch // 5)
  c.checkpoint.every_steps = epoch
  score = {"kind": "classification", "ops": f"decode|resize({size})"}
  c.evals = {
    "test": {**score, "split": test},
    "val": {**score, "split": val, "every_steps": epoch},
  }
  return c


def _pad_and_crop(size) -> str:
  pad = max(1, (size if isinstance(size, int) else min(size)) // 8)
  return f"decode|resize({size})|pad({pad})|random_crop({size})"


def get_trials(arg: str = ""):
  """Returns what `vit-jax train` tries first, and the seconds that it has."""
  args = arguments(arg, ARGUMENTS)
  seconds = _seconds(args["budget"])
  if not (args["init"] and seconds):
    return {}, 0.0
  c = get_config(arg)
  size = re.search(r"\|resize\((.*?)\)\|", c.data.ops)[1]
  crops = {
    "no augmentation": f"decode|resize({size})",
    "pad and crop": c.data.ops,
    "crop of 50 to 100 %": f"decode_inception_crop({size}, 50)",
    "crop of 5 to 100 %": f"decode_inception_crop({size})",
  }
  candidates = {
    f"{name}{', mirrored' * mirrored}": {
      "data.ops": ops + "|flip_lr" * mirrored
    }
    for name, ops in crops.items()
    for mirrored in (False, True)
  }
  for name in ("no augmentation", "pad and crop", "pad and crop, mirrored"):
    for lr in (c.optim.lr / 3, c.optim.lr * 3):
      more = {"optim.lr": lr}
      candidates[f"{name}, lr {lr:g}"] = {**candidates[name], **more}
  for part, patterns in _frozen(c).items():
    more = {"optim.freeze": patterns}
    candidates[f"{part} alone"] = {**candidates["no augmentation"], **more}
  return candidates, seconds


def _seconds(budget: str) -> float:
  if match := re.fullmatch(r"(\d+(?:\.\d+)?)(m|s)|0", budget):
    return float(match[1] or 0) * (60 if match[2] == "m" else 1)
  raise ValueError(f"got budget={budget}, expected minutes such as 10m, or 0.")


def _frozen(c) -> dict[str, tuple[str, ...]]:
  """Returns what is trained -> the patterns of all other parameters."""
  from vit_jax import weights

  init = weights.read(c.init)
  tops = sorted({name.split("/")[0] for name in init.params} - {"head"})
  head = tuple(p for top in tops for p in (top, f"{top}/*"))
  blocks = sorted(
    {
      m[1] for n in init.params if (m := re.match(r"(.*/encoderblock_\d+)/", n))
    },
    key=lambda name: int(name.rsplit("_", 1)[1]),
  )
  if not blocks:
    return {"head": head}
  first = [f"{name}/*" for name in blocks[: len(blocks) // 2]]
  below = ("embedding/*", "cls", "Transformer/posembed_input/*", *first)
  return {"last half of the blocks": below, "head": head}

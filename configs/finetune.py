"""Fine-tunes any checkpoint: Table 4 of arXiv:2010.11929.

Run: python -m vit_jax.train --workdir=runs/cifar10 \
  --config=configs/finetune.py:init=runs/vit_b16,model=B/16,dataset=cifar10
Arguments: init (anything that vit_jax.load reads: a run, a .npz, a
.safetensors, a Hugging Face folder), model (B/16, R50+B/16, R50x1),
dataset (a TFDS name or folder:/path), res (pixels, a multiple of the patch).
Result: not yet run at full length.
"""

from vit_jax.config import defaults
from vit_jax.recipes import arguments, for_tpus
from vit_jax.variants import family, nearest

# Split to train on, split to score, steps, learning rate. Steps are Table 4's;
# each learning rate is one of the grid that the paper searches per data set.
DATASETS = {
  "imagenet2012": ("train", "validation", 20_000, 0.03),
  "cifar10": ("train", "test", 10_000, 0.01),
  "cifar100": ("train", "test", 10_000, 0.01),
  "oxford_iiit_pet": ("train", "test", 500, 0.003),
  "oxford_flowers102": ("train+validation", "test", 500, 0.03),
  "folder": ("train", "val", 2500, 0.01),
}
ARGUMENTS = {"init": "", "model": "B/16", "dataset": "cifar10", "res": "384"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  kind = args["dataset"].split(":")[0]
  if kind not in DATASETS:
    raise ValueError(
      f"got dataset={args['dataset']}, expected one of {', '.join(DATASETS)}"
      f" (a folder as folder:/path).{nearest(kind, DATASETS)}"
    )
  train, test, steps, lr = DATASETS[kind]
  if not args["res"].isdigit():
    raise ValueError(f"got res={args['res']}, expected pixels such as 384.")
  res = int(args["res"])

  c = defaults()
  c.init = args["init"] or None
  c.model.variant = args["model"]
  c.model.name = family(args["model"])
  c.model.dtype = "bfloat16"
  c.data.dataset, c.data.split = args["dataset"], train
  c.data.batch_size = 512
  c.data.ops = f"decode_inception_crop({res})|flip_lr"
  c.total_steps = steps
  for_tpus(c, microbatch=16)
  c.optim.name = "sgd"
  c.optim.momentum = 0.9
  c.optim.lr = lr
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 100 if steps <= 500 else 500
  c.optim.clip_norm = 1.0
  c.checkpoint.every_steps = 500
  c.evals = {
    "test": {
      "kind": "classification",
      "split": test,
      "ops": f"decode|resize({res})",
      "every_steps": 500,
    }
  }
  return c

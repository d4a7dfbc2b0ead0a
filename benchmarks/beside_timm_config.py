"""A small ViT on photographs of 32 px, as timm trains it; see beside_timm.py.

Arguments: path (a folder with train/CLASS and val/CLASS), init (the weights at
the start), epochs (after one of warm-up).
"""

from vit_jax.config import arguments, defaults, whole_number

STEPS = 156  # of an epoch: timm leaves out the last 32 of 20,000 images
DECODE = "decode(dct='accurate')"  # the pixels of Pillow
ARGUMENTS = {"path": "", "init": "", "epochs": "2"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  c = defaults()
  c.init, c.init_mean = args["init"] or None, "half"
  c.model.variant, c.model.gelu = "Ti/8", "erf"
  c.model.width, c.model.depth = 64, 4
  c.model.mlp_dim, c.model.num_heads = 256, 2
  c.model.stochastic_depth = 0.1
  c.data.dataset, c.data.split = f"folder:{args['path']}", "train"
  c.data.batch_size = 128
  c.data.ops = (
    f"{DECODE}|random_resized_crop(32, 0.3, 1.0)|flip_lr|randaug_timm(9)"
  )
  c.objective.mixup, c.objective.label_smoothing = 0.8, 0.1
  c.total_steps = STEPS * (1 + whole_number(args, "epochs"))
  c.optim.lr, c.optim.weight_decay, c.optim.clip_norm = 1e-3, 0.05, 1.0
  c.optim.schedule, c.optim.warmup_steps = "cosine", STEPS
  c.checkpoint.every_steps = 0
  score = {"split": "val", "ops": f"{DECODE}|resize(32)"}
  c.evals = {"val": {"kind": "classification", **score}}
  return c

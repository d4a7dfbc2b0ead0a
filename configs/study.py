"""The paper in miniature: tiny models on subsets of glyphs, scored on digits.

`make study` runs a grid of these configs (benchmarks/study.py) for the figures
and tables of benchmarks/notes/study.md: figures 4 and 5, Table 8 and section
4.6 of arXiv:2010.11929.

Run: vit-jax train \
  --config=study:model=vit-small,images=2560,seed=1
Arguments: model (of MODELS), images (of the 40,000 of glyphs, drawn by the
seed), steps (of 64 images), seed (of all random numbers), posemb (as in
config.model, for Transformers), posemb_at (as posemb), task (of TASKS), init (a
run whose weights are fine-tuned, for task=digits).

A model is fine-tuned on handwritten digits exactly as in
configs/digits_finetune.py. Otherwise the recipe is that of configs/glyphs.py,
except for the length and the learning rate. Each family has its own rate. It
was chosen by the accuracy of the small model on the validation glyphs, in
percent, after 1,200 steps on all images with seed 0 (for the hybrid by the loss
of the two best):

  rate    1.5e-3  3e-3  6e-3  1.2e-2  2.4e-2
  vit     50.0    61.4  59.4
  hybrid  76.8    76.8  51.2
  resnet  88.1    93.2  94.7  95.9    95.3

Larger models, subsets, other positions and masked patches have the rate of
their family. Digits were not used for these choices. Cost and results:
benchmarks/notes/study.md.
"""

from vit_jax.config import arguments, check_choices, recipe, whole_number

NUM_IMAGES = 40_000
# Multiply-adds of one image (32 px, 92 classes), in millions, in the comments;
# those of a size differ by less than 10 %.
MODELS = {
  "vit-small": dict(variant="Ti/8", width=64, depth=5),  # 4.30
  "vit-medium": dict(variant="Ti/8", width=80, depth=5),  # 6.60
  # The root alone, 4 times smaller than the image, and patches of 2 on it.
  "hybrid-small": dict(variant="R+Ti/4", width=64, depth=4),  # 4.62
  "hybrid-medium": dict(variant="R+Ti/4", width=80, depth=4),  # 6.45
  "resnet-small": dict(stage_blocks=(1, 1)),  # 4.31
  "resnet-medium": dict(stage_blocks=(2, 2)),  # 6.54
}
LEARNING_RATES = {"vit": 3e-3, "hybrid": 3e-3, "resnet": 1.2e-2}
TASKS = {
  "glyphs": "supervised pre-training",
  "masked": "masked patch prediction, without labels",
  "digits": "fine-tuning on handwritten digits",
}
ARGUMENTS = {
  "model": "vit-small",
  "images": str(NUM_IMAGES),
  "steps": "1200",
  "seed": "0",
  "posemb": "learn",
  "posemb_at": "stem",
  "task": "glyphs",
  "init": "",
}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"model": MODELS, "task": TASKS})
  images, steps = (whole_number(args, name) for name in ("images", "steps"))
  seed = whole_number(args, "seed", low=0)
  if args["init"] and args["task"] != "digits":
    raise ValueError(f"got init with task={args['task']}, expected digits.")
  if args["task"] == "digits":
    c = recipe("digits_finetune")
    c.init = args["init"] or None
  else:
    c = _pretraining(args, images, steps, seed)
  _model(c, args)
  c.seed = seed
  c.log_steps = 100
  c.checkpoint.every_steps = 0
  return c


def _pretraining(args, images: int, steps: int, seed: int):
  c = recipe("glyphs")
  if images < NUM_IMAGES:
    c.data.split = f"train@{images}/seed={seed}"
  c.total_steps = steps
  c.optim.warmup_steps = steps // 20
  c.optim.lr = LEARNING_RATES[args["model"].split("-")[0]]
  fewshot = {
    **c.evals["fewshot"],
    "l2": (16.0,),
    # Untrained weights and pixels, beside the runs that have the most images.
    "baselines": images == NUM_IMAGES,
  }
  if args["task"] == "masked":
    c.objective.kind = "masked_patch"
    c.objective.target = "mean_color"
    c.evals = {"fewshot": fewshot}
  else:
    glyphs = {**c.evals["glyphs"], "every_steps": 0}  # once, at the end
    c.evals = {"fewshot": fewshot, "glyphs": glyphs}
  return c


def _model(c, args) -> None:
  sizes, family = MODELS[args["model"]], args["model"].split("-")[0]
  if family == "resnet":
    c.model.name, c.model.variant = "bit", "R50x1"
    for key in ("width", "depth", "mlp_dim", "num_heads"):
      c.model[key] = None
    c.model.pool = "token"
    c.model.stage_blocks = sizes["stage_blocks"]
  else:
    c.model.variant = sizes["variant"]
    c.model.width, c.model.depth = sizes["width"], sizes["depth"]
    c.model.mlp_dim, c.model.num_heads = 4 * sizes["width"], 4
    c.model.pool = "gap"
    c.model.posemb, c.model.posemb_at = args["posemb"], args["posemb_at"]
  if family != "vit":
    c.model.stage_width = 0.5

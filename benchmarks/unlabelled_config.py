"""A small ViT on photographs of 32 px, by one of several methods.

Arguments: path (a folder with train/CLASS and val/CLASS), method (of NAMES),
epochs, init (a run to fine-tune, for supervised), teacher (a run, for logits,
soft, hard and features; it sees the crops at 42 px).
"""

from vit_jax.config import arguments, check_choices, defaults, whole_number

TAUGHT = ("logits", "soft", "hard", "features")
NAMES = ("supervised", "mae", "dino", "uncentred", "lejepa", "none", *TAUGHT)
ARGUMENTS = {
  "path": "",
  "method": "",
  "epochs": "20",
  "init": "",
  "teacher": "",
}
COLOURS = "|flip_lr|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
PROTOTYPES = 4096


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"method": NAMES})
  method, epochs = args["method"], whole_number(args, "epochs")
  c = defaults()
  c.init = args["init"] or None
  c.model.variant, c.model.posemb = "Ti/8", "sincos2d"
  c.model.width, c.model.depth = 128, 4
  c.model.mlp_dim, c.model.num_heads = 512, 4
  c.data.dataset, c.data.split = f"folder:{args['path']}", "train"
  c.data.batch_size = 128
  c.data.ops = (
    f"decode|random_resized_crop(32, 0.3, 1.0){COLOURS}|solarize(0.1)"
  )
  c.total_epochs = float(epochs)
  c.optim.lr, c.optim.weight_decay, c.optim.clip_norm = 1e-3, 0.05, 1.0
  c.optim.schedule, c.optim.warmup_steps = "cosine", 78
  c.log_steps = 100
  c.checkpoint.every_steps = 0
  local = f"decode|random_resized_crop(16, 0.05, 0.3){COLOURS}"
  score = {"ops": "decode|resize(32)", "split": "val"}
  every = {"every_steps": 2 * 156, "at_start": True}
  if method == "supervised":
    c.data.ops = "decode|pad(4)|random_crop(32)|flip_lr"
    c.evals = {"top1": {**score, "kind": "classification"}}
  elif method in TAUGHT:
    crop = "decode|inception_crop({}, 30, 100, antialias=True)|flip_lr"
    c.data.ops = crop.format(32)
    c.objective = {
      "kind": "distillation",
      "teacher": args["teacher"],
      "teacher_ops": crop.format(42),
      "loss": method,
    }
    if method == "soft":
      c.objective.alpha, c.objective.temperature = 0.1, 3.0
    if method != "features":
      c.evals = {"top1": {**score, "kind": "classification"}}
  elif method == "mae":
    c.data.ops = "decode|random_resized_crop(32, 0.2, 1.0)|flip_lr"
    c.objective.kind = "mae"
    c.objective.decoder_width = 64
    c.objective.decoder_depth, c.objective.decoder_heads = 2, 4
  elif method in ("dino", "uncentred"):
    c.objective.kind = "dino"
    c.objective.prototypes, c.objective.hidden = PROTOTYPES, 512
    c.objective.local_ops, c.objective.local_crops = local, 4
    c.objective.teacher_momentum = 0.996
    c.objective.centring = "none" if method == "uncentred" else "mean"
    c.callbacks = (
      "vit_jax.self_supervised.collapse:CollapseAlarm"
      f"(prototypes={PROTOTYPES})",
    )
  elif method == "lejepa":
    c.objective.kind = "lejepa:LeJEPA"
    c.objective.local_ops, c.objective.local_crops = local, 4
  if method == "none":
    c.total_epochs, c.total_steps = None, 1
    c.optim.warmup_steps, c.optim.lr = 0, 1e-12
  features = {**score, "train_split": "train"}
  c.evals |= {
    "knn": {**features, **every, "kind": "knn", "ks": (20,)},
    "rankme": {**score, **every, "kind": "rankme", "split": "train"},
    "linear": {**features, "kind": "linear", "steps": 3000},
  }
  return c

"""DeiT III: supervised training of ViTs, arXiv:2204.07118.

Run, two stages of B/16:
  vit-jax train --workdir=runs/deit3 --config=deit3:stage=i1k
  vit-jax train --workdir=runs/deit3_224 \
    --config=deit3:stage=i1k_224,init=runs/deit3
Arguments: stage (of STAGES: i1k, from scratch on ImageNet; i1k_224 and i1k_384,
fine-tuned from i1k; i21k, from scratch on ImageNet-21k; i21k_i1k, fine-tuned
from i21k), model (of the stage's row in STAGES), init (weights of the previous
stage; not for i1k and i21k).
On ImageNet, the official validation images are scored once, at the end, as
`val`; nothing is chosen by them.

The numbers are those of the commands in facebookresearch/deit,
README_revenge.md; the paper has a weight decay of 0.02 everywhere. From
scratch: LAMB, 3-Augment (one of grey, solarize, blur), colour jitter 0.3, mixup
and cutmix. ImageNet: crops, three copies of an image in a batch, and binary
cross-entropy with mixed targets of 1. ImageNet-21k: a crop of the whole height
or width, and a softmax. All blocks have the same stochastic depth. The bound of
the gradient's norm, 1.0, is the default of FusedLAMB.
Differences to the publishers' code:
- Images are in [-1, 1] (there: ImageNet's mean and deviation).
- Crops for patches of 14 have 154 and 126 px (there 160 and 128, of which the
  patches do not read the last 6 and 2 pixels).
- TensorFlow draws the window of a crop: the aspect ratio is uniform (there: its
  logarithm).
- The partner of a mixed image is the previous row (timm: the batch reversed).
- An epoch of three copies takes the next third of a permutation (there: of a
  new one).
- The head begins at zero, and the warm-up at 0 (there: 1e-6).

Cost, FLOPs of training on ImageNet (stage i1k, 800 epochs): S/16 28.3 exaFLOPs,
B/16 78.6, L/16 276, H/14 480.
Pillow augments the images, at several times the cost of randaug: check with
vit-jax benchmark --input=real that the host is fast enough.
Result: not yet run. The publishers' top-1 on ImageNet and on V2 (H/14 at 224
px):
          S/16         M/16         B/16         L/16         H/14
  i1k     81.4  70.5   83.0  72.3   83.8  73.6   84.9  75.1   85.2  75.9
    384   83.4  73.1                85.0  74.8   85.8  76.7
  i21k    83.1  73.8   84.5  74.7   85.7  76.5   87.0  78.6   87.2  79.2
    384                             86.7  77.9   87.7  79.1
"""

from vit_jax.config import arguments, check_choices, defaults

# Stage -> model -> pixels, epochs, peak learning rate, stochastic depth. M/16
# has no command.
STAGES = {
  "i1k": {
    "S/16": (224, 800, 4e-3, 0.05),
    "B/16": (192, 800, 3e-3, 0.2),
    "L/16": (192, 800, 3e-3, 0.45),
    "H/14": (154, 800, 3e-3, 0.6),
  },
  "i1k_224": {
    "B/16": (224, 20, 1e-5, 0.2),
    "L/16": (224, 20, 1e-5, 0.45),
    "H/14": (224, 20, 1e-5, 0.55),
  },
  "i1k_384": {
    "S/16": (384, 20, 1e-5, 0.0),
    "B/16": (384, 20, 1e-5, 0.15),
    "L/16": (384, 20, 1e-5, 0.4),
  },
  "i21k": {
    "S/16": (224, 240, 1e-3, 0.05),
    "B/16": (224, 240, 1e-3, 0.1),
    "L/16": (224, 240, 1e-3, 0.3),
    "H/14": (126, 90, 1e-3, 0.5),
  },
  "i21k_i1k": {
    "S/16": (224, 50, 3e-4, 0.05),
    "B/16": (224, 50, 3e-4, 0.15),
    "L/16": (224, 50, 3e-4, 0.4),
    "H/14": (224, 50, 3e-4, 0.45),
  },
}
ARGUMENTS = {"stage": "i1k", "model": "B/16", "init": ""}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  stage = args["stage"]
  check_choices(args, {"stage": STAGES})
  check_choices(args, {"model": STAGES[stage]})
  is_scratch, is_21k = stage in ("i1k", "i21k"), stage == "i21k"
  is_short = stage in ("i1k_224", "i1k_384")  # 20 epochs, of another recipe
  if args["init"] and is_scratch:
    raise ValueError(f"init: got {args['init']} for {stage}, expected none.")
  pixels, epochs, lr, depth = STAGES[stage][args["model"]]

  c = defaults()
  c.init = args["init"] or None
  c.total_epochs = float(epochs)
  c.model.name = "modern"
  c.model.variant = args["model"]
  c.model.layer_scale = 1e-4
  c.model.cls_row = False
  c.model.gelu = "erf"
  c.model.stochastic_depth = depth
  c.model.stochastic_depth_rule = "constant"
  c.model.dtype = "bfloat16"
  if stage == "i1k":
    c.objective.loss = "bce"
    c.objective.binary_targets = True
  else:
    c.objective.loss = "softmax"
    c.objective.label_smoothing = 0.1
  c.objective.mixup = 0.0 if "i21k" in stage else 0.8
  c.objective.cutmix = 1.0

  c.data.dataset = "imagenet21k" if is_21k else "imagenet2012"
  c.data.split = "full[51200:]" if is_21k else "train"
  c.data.batch_size = 512 if is_short else 2048
  c.data.repeats = 3 if stage == "i1k" else 1
  crop = (
    f"decode_inception_crop({pixels}, 8, 100, method='bicubic', antialias=True)"
  )
  if "i21k" in stage:
    crop = (
      f"decode|resize_small_torch({pixels})|pad(4, 'reflect')"
      f"|random_crop({pixels})"
    )
  distort = "randaug_timm(9)" if is_short else "three_augment|color_jitter(0.3)"
  c.data.ops = f"{crop}|flip_lr|{distort}"
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = 16 if args["model"] == "H/14" else 64  # of each

  c.optim.lr = lr
  c.optim.end_lr = 1e-5
  c.optim.schedule = "cosine"
  images = 14_145_922 if is_21k else 1_281_167
  c.optim.warmup_steps = round(5 * images / c.data.batch_size)  # 5 epochs
  if is_short:
    c.optim.weight_decay = 0.1
  else:
    c.optim.name = "lamb"
    c.optim.weight_decay = 0.02 if "i21k" in stage else 0.05
    c.optim.clip_norm = 1.0
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 50_000

  score = {"kind": "classification"}
  score["ops"] = f"decode|resize_small_torch({pixels})"
  score["ops"] += f"|central_crop_torch({pixels})"
  if is_21k:
    c.evals = {
      "test": {**score, "split": "full[:25600]"},
      "val": {**score, "split": "full[25600:51200]", "every_steps": 10_000},
    }
  else:
    c.evals = {"val": {**score, "split": "validation"}}
  return c

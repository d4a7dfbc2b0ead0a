"""Distillation: a small model learns from a frozen one.

Run: vit-jax train --workdir=runs/r50 \
  --config=distill:teacher=BiT-R152x2.npz,model=R50x1
  vit-jax train --workdir=runs/deit_s \
  --config=distill:loss=hard,teacher=runs/teacher,model=S/16
  vit-jax train --workdir=runs/small_dino --config=distill:loss=features,\
teacher=hf-hub:facebook/dinov3-vitl16-pretrain-lvd1689m,model=S/16
Arguments: teacher (anything that vit_jax.load reads; for logits, soft and hard
a classifier of the same classes), loss (of RECIPES: logits, soft, hard or
features, see vit_jax/self_supervised/distillation.py), model (the student, any
that vit-jax models prints), dataset (imagenet2012, another TFDS data set with
the splits train and test, folder:/path with train and val; for features also
images:/path, images without classes, which nothing scores), res (pixels),
teacher_res (pixels of the teacher's images; by default res), epochs (of
RECIPES by default).

logits: function matching, arXiv:2106.05237 and big_vision's proj/distill. The
teacher sees the crop and the mixup of the student, and labels are not used;
batch, warm-up, rate, decay, clipping, and the momentum in bfloat16 are
big_vision's for ResNets (its decay of 3e-4 does not depend on the rate); there,
98 % of train are trained on. For Transformers, rate and decay are those of
configs/vit_s16.py. The length matters most: the paper has 1,200 epochs or more.
hard, soft: DeiT, arXiv:2012.12877, with the distillation token; RandAugment,
random erasing, mixup and cutmix, three copies of an image in a batch. The paper
recommends hard. Differences to its code: those of configs/mae_finetune.py for
images and mixing. DeiT's teacher is a RegNetY-16GF, which vit_jax does not
read.
features: cosine distance of class token and patch tokens; no labels, so any
backbone is a teacher. No paper has this recipe; it is AdamW with the numbers of
DeiT, without mixing.

The teacher's kernels are in bfloat16: 2 bytes a parameter on the devices,
divided by mesh.fsdp. Every process reads the whole file: it needs 4 bytes a
parameter on the host, and 2 more for the cast copy (DINOv3 7B: 40 GB).
Cost: each step has a forward pass of the teacher on the student's images
(R152x2 at 224 px: 3.7 times the training step of R50x1; 1,200 epochs of both
are 179 exaFLOPs).
By the planner's estimate (jax 0.12.0.1, libtpu 0.0.50.1), features of DINOv3 7B
for L/16 with --config.model.scan=true: 1.6 GiB a chip and 189.6 ms a step of
1,024 images on v5e:16x16; 2.4 GiB and 89.5 ms on v5p:4x4x8.
Result: not yet run. Published top-1 on ImageNet: R50x1 from R152x2 82.8 at 224
px (80.5 at 160 px; the length of that run is not confirmed); DeiT with the
token, hard labels, 300 epochs: Ti/16 74.5, S/16 81.2, B/16 83.4.
"""

from vit_jax.config import arguments, check_choices, defaults, whole_number
from vit_jax.families import family

# Loss -> epochs, images of a batch.
RECIPES = {
  "logits": (1200, 4096),
  "soft": (300, 1024),
  "hard": (300, 1024),
  "features": (100, 1024),
}
ARGUMENTS = {
  "teacher": "",
  "loss": "logits",
  "model": "S/16",
  "dataset": "imagenet2012",
  "res": "224",
  "teacher_res": "",
  "epochs": "",
}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"loss": RECIPES})
  if not args["teacher"]:
    raise ValueError("expected teacher=WEIGHTS, which the student learns from.")
  loss, dataset, res = args["loss"], args["dataset"], whole_number(args, "res")
  epochs, batch = RECIPES[loss]
  is_deit = loss in ("soft", "hard")

  c = defaults()
  c.total_epochs = (
    float(whole_number(args, "epochs")) if args["epochs"] else (float(epochs))
  )
  c.model.name = "modern" if is_deit else family(args["model"])
  c.model.variant = args["model"]
  c.model.dtype = "bfloat16"
  if is_deit:
    c.model.distilled = True
    c.model.gelu = "erf"
    c.model.stochastic_depth = 0.1
  c.objective = {
    "kind": "distillation",
    "teacher": args["teacher"],
    "loss": loss,
    "teacher_dtype": "bfloat16",
  }
  if loss == "logits":
    c.objective.mixup = 1.0  # a uniform share
  elif is_deit:
    c.objective.token = True
    c.objective.label_smoothing = 0.1
    c.objective.mixup = 0.8
    c.objective.cutmix = 1.0
  if loss == "soft":
    c.objective.alpha = 0.1
    c.objective.temperature = 3.0

  def ops(side: int) -> str:
    if is_deit:
      crop = f"{side}, 8, 100, method='bicubic', antialias=True"
      distort = "|flip_lr|randaug_timm(9)|random_erase(0.25)"
      return f"decode_inception_crop({crop}){distort}"
    return f"decode_inception_crop({side})|flip_lr"

  c.data.dataset, c.data.split = dataset, "train"
  c.data.batch_size = batch
  c.data.repeats = 3 if is_deit else 1
  c.data.ops = ops(res)
  if args["teacher_res"]:
    c.objective.teacher_ops = ops(whole_number(args, "teacher_res"))
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = 64  # of each

  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 5 * 1_281_167 // batch  # 5 epochs of ImageNet
  if loss == "logits":
    c.optim.warmup_steps = 5000
    is_resnet = c.model.name == "bit"
    c.optim.lr = 0.03 if is_resnet else 1e-3
    c.optim.weight_decay = 3e-4 / 0.03 if is_resnet else 0.1
    c.optim.clip_norm = 1.0
    c.optim.accumulator_dtype = "bfloat16"
  else:
    c.optim.lr = 5e-4 * batch / 512
    c.optim.end_lr = 1e-5
    c.optim.weight_decay = 0.05
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 50_000

  kind = dataset.split(":")[0]
  score = {
    "split": {"imagenet2012": "validation", "folder": "val"}.get(kind, "test"),
    "ops": f"decode|resize_small({res * 256 // 224})|central_crop({res})",
  }
  if kind == "images":
    c.evals = {}
  elif loss == "features":
    c.evals = {
      "knn": {**score, "kind": "knn", "train_split": "train", "layer": "cls"}
    }
  else:
    c.evals = {"val": {**score, "kind": "classification"}}
  return c

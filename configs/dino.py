"""DINO: a ViT pre-trained without labels, on crops of an image.

The recipe of arXiv:2104.14294 on ImageNet: two crops of 224 px and eight of
96 px, 65,536 prototypes, a running mean as teacher. It is the running mean that
is scored and published.
Run: vit-jax train --config=dino:model=S/16,dataset=imagenet2012,epochs=100
Arguments: model (of MODELS), dataset (of DATASETS), epochs (of EPOCHS: 100; 300
with a warm-up of the teacher's temperature to 0.07 and learned norms of the
prototypes).

Differences to the authors' code:
- Images are in [-1, 1] (there: ImageNet's mean and deviation).
- Kernels of the backbone are Xavier uniform, the class token is zero (there:
  truncated normal, 0.02). The head is theirs.
- In the first epoch the last layer has the rate 0, and Adam's moments of it go
  on (there: no gradient).
- The warm-up begins at 0 and ends at step w (there: at w - 1).
- Clipping divides by the norm (there: by the norm plus 1e-6).
- Biases, norms, positions and class token have no weight decay (there: the last
  two do).
- The image of a row is drawn anew for each crop from the same decoded record,
  as there; the random numbers follow from seed, epoch, record and crop.
- The linear head is DINOv2's protocol, see configs/probes.py (there: 100 epochs
  with one rate).

Cost: 113.8 GFLOPs an image of S/16, all crops and the teacher included (a
supervised step: 27.6); 14.6 exaFLOPs for 100 epochs, B/16 167 for 300.
Result: not yet run. The authors' top-1 by k-NN and by linear heads, S/16:
  100 epochs  69.3  74.0
  300 epochs  73.3  76.0
  800 epochs  74.5  77.0    (B/16, 400 epochs: 76.1  78.2)
"""

from vit_jax.config import arguments, check_choices, defaults

MODELS = ("S/16", "B/16")
DATASETS = {"imagenet2012": 1_281_167}  # images
EPOCHS = ("100", "300")
ARGUMENTS = {"model": "S/16", "dataset": "imagenet2012", "epochs": "100"}
BATCH = 1024
COLOURS = "flip_lr|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
LARGE = f"decode|random_resized_crop(224, 0.4, 1.0)|{COLOURS}"
SMALL = f"decode|random_resized_crop(96, 0.05, 0.4)|{COLOURS}"
# Learning rates of the linear heads, for 256 images.
RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  choices = {"model": MODELS, "dataset": DATASETS, "epochs": EPOCHS}
  check_choices(args, choices)
  epochs, dataset = int(args["epochs"]), args["dataset"]
  steps = DATASETS[dataset] // BATCH  # of an epoch

  c = defaults()
  c.total_steps = epochs * steps
  c.model.variant = args["model"]
  c.model.dtype = "bfloat16"
  c.model.gelu = "erf"
  c.model.stochastic_depth = 0.1

  c.objective.kind = "dino"
  c.objective.second_ops = f"{LARGE}|gaussian_blur(0.1)|solarize(0.2)"
  c.objective.local_ops = f"{SMALL}|gaussian_blur(0.5)"
  if epochs == 300:
    c.objective.teacher_temperature_start = 0.04
    c.objective.teacher_temperature = 0.07
    c.objective.temperature_steps = 30 * steps
    c.objective.norm_last_layer = False

  c.data.dataset, c.data.split = dataset, "train"
  c.data.batch_size = BATCH
  c.data.ops = f"{LARGE}|gaussian_blur(1.0)"
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = 32  # of each

  c.optim.lr = 5e-4 * BATCH / 256
  c.optim.warmup_steps = 10 * steps
  c.optim.end_lr = 1e-6
  c.optim.weight_decay, c.optim.weight_decay_end = 0.04, 0.4
  c.optim.clip_norm, c.optim.clip_groups = 3.0, ("each",)
  c.optim.lr_zero = (f"dino/prototypes/*={steps}",)
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 50 * steps

  features = {
    "train_split": "train",
    "split": "validation",
    "ops": "decode|resize_small_torch(256)|central_crop_torch(224)",
  }
  c.evals = {
    "knn": {
      **features,
      "kind": "knn",
      "layer": "cls",
      "every_steps": 10 * steps,
    },
    "linear": {
      **features,
      "kind": "linear",
      "layers": ("cls", "cls*4"),
      "lrs": tuple(rate * 1024 / 256 for rate in RATES),
      "weight_decays": (0.0,),
      "steps": 12_500,
      "whiten": False,
      "train_ops": "decode_inception_crop(224, 8, 100, method='bicubic',"
      " antialias=True)|flip_lr",
    },
  }
  return c

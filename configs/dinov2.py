"""DINOv2 and DINOv3: ViTs pre-trained without labels, on images alone.

DINO on class tokens, iBOT on masked patches, KoLeo; two crops of 224 px and
eight of 96 px (98 for patches of 14). The running mean is scored and published.
Run: vit-jax train --workdir=runs/dinov2 --config=dinov2:recipe=short
Arguments: recipe (of RECIPES), dataset (a TFDS data set or images:/path; the
run has as many steps in any case), init (weights to start from), gram (weights
of an earlier teacher, for Gram anchoring).
- short: L/16 on ImageNet, 125,000 steps of 2,048 images, 65,536 prototypes.
- large, giant: L/14 and g/14 with SwiGLU on ImageNet-21k, 625,000 steps of
  3,072 and 1,152 images, 131,072 prototypes, Sinkhorn-Knopp.
- dinov3: as short, with rotary positions, Sinkhorn-Knopp and a head for
  patches: the authors' run on ImageNet alone.

Gram anchoring is a further stage of a run, in which similarities of patches
stay those of an earlier teacher, which sees the crops at twice the side:
  vit-jax train --workdir=runs/anchored \
    --config=dinov2:recipe=dinov3,init=runs/dinov3,gram=runs/dinov3
DINOv3's 7B model begins it after 1,010,000 steps. Every 10,000 steps, three
times, the teacher of that step becomes the earlier teacher. Here each of these
parts is a run of its own, with the workdir of the run before as init and gram.
The runs have only the loss in common with the authors', whose rates are
constant (3e-5).

Differences to the authors' code:
- Images are in [-1, 1] (there: ImageNet's mean and deviation).
- Which crops are masked, and how much, is drawn over the whole batch (there:
  over the images of a GPU), and so are centres (there: means of GPUs' means).
  KoLeo's neighbours are among as many consecutive rows as a GPU had images.
- With prototypes at rate 0 in the first epoch, Adam's moments go on.
- The warm-up begins at 0 and ends at step w (there: at w - 1).
- Clipping divides by the norm (there: by the norm plus 1e-6).
- Positions, class token, registers and mask token have no weight decay.
- dinov3: prototypes have the norm 1 (there: any); masks can have a few patches
  less than drawn (there: filled up at random).

Cost: short and dinov3 400.5 exaFLOPs, large 4,065, giant 5,482. The planner's
estimates with model.scan (jax 0.12.0.1, libtpu 0.0.50.1), for 256 chips of v5e
(v5e:16x16) and 128 of v5p (v5p:4x4x8):
         chip-hours       ms a step       GiB a chip
  short   1,317    562    148.2  126.4    4.2   8.4
  large  14,283  6,109    321.4  274.9    8.5  20.2
Result: not yet run. The authors' top-1 on ImageNet by k-NN and linear heads:
  short   81.6  82.9
  large   82.0  84.5
  dinov3  82.2  83.3
Source: arXiv:2304.07193, arXiv:2508.10104; facebookresearch/dinov2,
configs/train/vitl16_short.yaml, vitl14.yaml, vitg14.yaml and README.md; dinov3,
configs/train/vitl_im1k_lin834.yaml.
"""

from vit_jax.config import arguments, check_choices, defaults

EPOCH = 1250  # steps
# Images of a step and of a GPU there, epochs, those of the warm-up, learning
# rate for 1,024 images, weight decay at the end, momentum of the teacher at
# first, stochastic depth.
RECIPES = {
  "short": (2048, 64, 100, 10, 4e-3, 0.4, 0.992, 0.3),
  "large": (3072, 32, 500, 80, 2e-4, 0.2, 0.994, 0.4),
  "giant": (1152, 12, 500, 80, 2e-4, 0.2, 0.994, 0.4),
  "dinov3": (2048, 64, 100, 10, 4e-3, 0.4, 0.992, 0.3),
}
ARGUMENTS = {"recipe": "short", "dataset": "", "init": "", "gram": ""}
COLOURS = "flip_lr|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
# Learning rates of the linear heads, for 256 images.
RATES = (
  *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
  *(1e-2, 2e-2, 5e-2, 0.1),
)


def crop(pixels: int, least: float, most: float) -> str:
  return f"decode|random_resized_crop({pixels}, {least}, {most})|"


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"recipe": RECIPES})
  recipe = args["recipe"]
  batch, group, epochs, warmup, lr, decay, momentum, depth = RECIPES[recipe]
  is_large = recipe in ("large", "giant")
  dataset = args["dataset"] or ("imagenet21k" if is_large else "imagenet2012")

  c = defaults()
  c.init = args["init"] or None
  c.total_steps = epochs * EPOCH
  c.model.name = "modern"
  c.model.variant = {"large": "L/14", "giant": "g2/14"}.get(recipe, "L/16")
  if is_large:
    c.model.mlp = "swiglu"
  if recipe == "large":
    c.model.mlp_dim = 2736
  if recipe == "dinov3":
    c.model.posemb, c.model.rope = "none", "dinov3"
    c.model.rope_periods = "bfloat16"
  c.model.layer_scale = 1e-5
  c.model.gelu = "erf"
  c.model.stochastic_depth = depth
  c.model.stochastic_depth_rule = "constant"
  c.model.dtype = "bfloat16"

  c.objective.kind = "dinov2"
  c.objective.teacher_momentum = momentum
  c.objective.teacher_temperature_start = 0.04
  c.objective.teacher_temperature = 0.07
  c.objective.temperature_steps = 30 * EPOCH
  c.objective.koleo_group = group
  if recipe != "short":
    c.objective.centring = "sinkhorn"
    c.objective.patch_head = True
  if is_large:
    c.objective.prototypes = 131_072
    c.objective.bottleneck = 384
  large = crop(224, 0.32, 1.0)
  small = crop(98 if is_large else 96, 0.05, 0.32)
  c.data.ops = f"{large}{COLOURS}|gaussian_blur(1.0)"
  c.objective.second_ops = f"{large}{COLOURS}|gaussian_blur(0.1)|solarize(0.2)"
  c.objective.local_ops = f"{small}{COLOURS}|gaussian_blur(0.5)"
  if args["gram"]:
    c.objective.gram, c.objective.gram_model = 2.0, args["gram"]
    c.objective.gram_ops = f"{crop(448, 0.32, 1.0)}flip_lr"

  c.data.dataset = dataset
  c.data.split = "full[51200:]" if dataset == "imagenet21k" else "train"
  c.data.batch_size = batch
  c.mesh.fsdp = -1  # the state is split over up to 16 chips

  c.optim.lr = lr * (batch / 1024) ** 0.5
  c.optim.end_lr = 1e-6
  c.optim.warmup_steps = warmup * EPOCH
  c.optim.weight_decay, c.optim.weight_decay_end = 0.04, decay
  c.optim.clip_norm = 3.0
  heads = ["token_head"] + ["patch_head"] * c.objective.patch_head
  c.optim.clip_groups = tuple(f"dinov2/{head}/*" for head in heads)
  c.optim.lr_zero = (f"dinov2/*/prototypes/*={EPOCH}",)
  c.optim.lr_scale = ("embedding/*=0.2",)
  if not is_large:
    c.optim.layer_decay = 0.9
    # As the tokens of the network, layer 0 of L/16.
    c.optim.lr_scale += (f"dinov2/mask_token={0.9**25:.6f}",)
  c.checkpoint.every_steps = EPOCH
  c.checkpoint.keep_every_steps = 10 * EPOCH
  if dataset == "imagenet2012":
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
        "every_steps": 10 * EPOCH,
      },
      "linear": {
        **features,
        "kind": "linear",
        "layers": ("cls", "cls+patches", "cls*4", "cls*4+patches"),
        "lrs": tuple(rate * 1024 / 256 for rate in RATES),
        "weight_decays": (0.0,),
        "steps": 12_500,
        "whiten": False,
        "train_ops": "decode_inception_crop(224, 8, 100, method='bicubic',"
        " antialias=True)|flip_lr",
      },
    }
  return c

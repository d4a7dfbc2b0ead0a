"""Fine-tunes the encoders of MAE on ImageNet: arXiv:2111.06377.

Run: vit-jax train --workdir=runs/mae_b16 \
  --config=mae_finetune:model=B/16,init=mae_pretrain_vit_base.pth
Arguments: model (of MODELS), init (weights of MAE's pre-training, or a run of
--config=mae; the encoder is read, and its fixed positions are learned from
there on).
The official validation images are scored once, at the end, as `val`; nothing is
chosen by them.

The recipe is that of facebookresearch/mae, FINETUNE.md: the mean over the
patches and a new LayerNorm after it, layer-wise learning rate decay, mixup and
cutmix (half of the steps each), RandAugment, random erasing, and stochastic
depth that rises from 0 to the rate in MODELS. The learning rate is the base
rate times batch / 256.
Differences to the publishers' code:
- The patch embedding normalises the images, so the noise of an erased box is
  clipped to the range of pixels.
- TensorFlow draws the window of a crop: the aspect ratio is uniform (there: its
  logarithm).
- The partner of a mixed image is the previous row (timm: the batch reversed).
- The head begins at zero (there: a standard deviation of 2e-5).

Cost, FLOPs of training: B/16 13.5 exaFLOPs, L/16 23.7, H/14 64.3.
Pillow augments the images, at twice the cost of randaug: check with vit-jax
benchmark --input=real that the host is fast enough.
Result: not yet run. The publishers' top-1 (top-5) on ImageNet:
  B/16  83.66 (96.53); four seeds: 83.63 83.66 83.52 83.46
  L/16  85.95 (97.57); four seeds: 85.95 85.87 85.76 85.88
  H/14  86.93 (98.09)
and top-1 on other sets, with the mean corruption error of ImageNet-C:
        A     R     Sketch  C, error
  B/16  35.9  48.3  34.5    51.7
  L/16  57.1  59.9  45.3    41.8
  H/14  68.2  64.4  49.6    33.8
"""

from vit_jax.config import arguments, check_choices, defaults

# Model -> epochs, base learning rate, decay by layers, stochastic depth, images
# of a microbatch on each device.
MODELS = {
  "B/16": (100, 5e-4, 0.65, 0.1, 64),
  "L/16": (50, 1e-3, 0.75, 0.2, 64),
  "H/14": (50, 1e-3, 0.75, 0.3, 16),
}
ARGUMENTS = {"model": "B/16", "init": ""}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"model": MODELS})
  epochs, base_lr, layer_decay, depth, microbatch = MODELS[args["model"]]

  c = defaults()
  c.init = args["init"] or None
  c.total_epochs = float(epochs)
  c.model.name = "modern"
  c.model.variant = args["model"]
  c.model.pool = "gap"
  c.model.final_norm = "pooled"
  c.model.gelu = "erf"
  c.model.stochastic_depth = depth
  c.model.dtype = "bfloat16"
  c.objective.loss = "softmax"
  c.objective.label_smoothing = 0.1
  c.objective.mixup = 0.8
  c.objective.cutmix = 1.0

  c.data.dataset = "imagenet2012"
  c.data.split = "train"
  c.data.batch_size = 1024
  c.data.ops = (
    "decode_inception_crop(224, 8, 100, method='bicubic', antialias=True)"
    "|flip_lr|randaug_timm(9)|random_erase(0.25)"
  )
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = microbatch  # of each
  c.optim.lr = base_lr * 1024 / 256
  c.optim.end_lr = 1e-6
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 6256  # 5 * 1,281,167 / 1024
  c.optim.weight_decay = 0.05
  c.optim.layer_decay = layer_decay
  c.checkpoint.every_steps = 1000
  c.evals = {
    "val": {
      "kind": "classification",
      "split": "validation",
      "ops": "decode|resize_small_torch(256)|central_crop_torch(224)",
    }
  }
  return c

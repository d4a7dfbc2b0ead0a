"""A small ViT on CIFAR-10, from scratch at 32 px: ViT-Lite, arXiv:2104.05704.

ViT-Lite-7/4 (7 blocks of width 256, 4 heads, patch 4, 3.7 million parameters)
with the recipe that its authors publish for CCT-7/3x1: RandAugment, mixup,
cutmix, label smoothing and stochastic depth.
Run: vit-jax train --workdir=runs/cifar --config=cifar_vit
Arguments: dataset (cifar10, or folder:/path with train and val; images of
another size become 32 px), epochs (the recipe's are 300; a thirtieth of them is
warm-up).
All of `train` is trained on. `test` (of a folder `val`) is scored once, at the
end; nothing is chosen by it.

Source: SHI-Labs/Compact-Transformers, configs/pretrained/
cct_7-3x1_cifar10_300epochs.yml (6bd53cc), src/vit.py and
src/utils/transformers.py. The training script there is timm's.
Differences to the publishers' code:
- Mixup and cutmix stay on (there: off from epoch 175), and 10 more epochs at
  the lowest rate are left out.
- A block is x + branch(norm(x)) (there, the MLP's branch is added to the norm,
  not to its input); attention has biases and no dropout (there: 0.1).
- Positions begin with a deviation of 0.02 (there: 0.2), matrices with Glorot's
  (there: 0.02), the head at zero.
- The rate rises from 0, by step (there: from 1e-5, by epoch), and the cosine
  begins after the warm-up (there: before).
- Crops are resized bicubically (there: at random also bilinearly); images are
  in [-1, 1] (there: the set's mean and deviation).
- The partner of a mixed image is the previous row (timm: the batch reversed).
- Matrix products are in bfloat16 (there: float16).

Cost: 1.53 GFLOPs of training an image, 23 petaFLOPs for 300 epochs. By the
planner's estimate a chip of TPU v5e takes 8.3 ms a step, 0.3 hours in all, but
only if the host augments 15,500 images a second, which takes Pillow many cores:
check with vit-jax benchmark --input=real.
Result: not yet run at full length. Three epochs (cosine and all) on 20,000
images of CIFAR-10, re-encoded as JPEG, in float32, top-1 on 5,000 others after
each half epoch: 20.8, 26.6, 28.9, 30.5, 31.9, 32.9 %. This took 47 minutes on
two cores of an AMD EPYC that other programs used.
The publishers' top-1 on CIFAR-10: 91.38 % (ViT-Lite-7/4, 200 epochs of an
earlier training script), 96.53 % (CCT-7/3x1, which has convolutions instead of
patches, these 300 epochs).
"""

from vit_jax.config import arguments, defaults, number

TRAIN = 50_000  # images of CIFAR-10
BATCH = 128
ARGUMENTS = {"dataset": "cifar10", "epochs": "300"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  dataset, epochs = args["dataset"], number(args, "epochs")
  is_folder = dataset.startswith("folder:")
  num_images = TRAIN
  if is_folder:
    from vit_jax.data.sources import Sources  # takes seconds to import

    num_images = Sources().inspect(dataset, "train").num_examples

  c = defaults()
  c.total_epochs = epochs
  c.model.variant = "Ti/4"
  c.model.width, c.model.depth = 256, 7
  c.model.mlp_dim, c.model.num_heads = 512, 4
  c.model.gelu, c.model.ln_eps = "erf", 1e-5
  c.model.stochastic_depth = 0.1
  c.model.dtype = "bfloat16"
  c.objective.mixup, c.objective.cutmix = 0.8, 1.0
  c.objective.label_smoothing = 0.1

  c.data.dataset, c.data.split = dataset, "train"
  c.data.batch_size = BATCH
  c.data.ops = (
    "decode|random_resized_crop(32, 0.8, 1.0)|flip_lr|randaug_timm(9)"
  )

  c.optim.lr, c.optim.end_lr = 5.5e-4, 1e-5
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = round(epochs / 30 * num_images / BATCH)  # 10 epochs
  c.optim.weight_decay = 0.06
  c.checkpoint.every_steps = 1000
  score = {"kind": "classification", "ops": "decode|resize(32)"}
  c.evals = {"test": {**score, "split": "val" if is_folder else "test"}}
  return c

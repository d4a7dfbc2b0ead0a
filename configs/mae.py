"""Masked autoencoders: pre-training without labels, arXiv:2111.06377.

Run: vit-jax train --workdir=runs/mae_b16 \
  --config=mae:model=B/16,dataset=imagenet2012
  vit-jax train --workdir=runs/mae_b16_fine \
    --config=mae_finetune:model=B/16,init=runs/mae_b16
  vit-jax visualize runs/mae_b16 photos/ --out=inside
Arguments: model (of MODELS), dataset (imagenet2012, folder:/path/to/images, or
glyphs: the small model of configs/glyphs.py on the same letters and symbols),
epochs (800, or 1600 for the best published results), or steps in place of
epochs.
For ImageNet, few-shot accuracy is scored as in configs/vit.py.

The recipe is that of facebookresearch/mae, PRETRAIN.md: 75 % of the patches are
masked, and the encoder computes the others alone; a decoder of 8 blocks of
width 512 predicts the pixels of each masked patch, standardised by the patch's
own mean and deviation. The learning rate is the base rate 1.5e-4 times batch /
256. The decoder is in the checkpoint of the run, and other runs and
`vit_jax.load` leave it out.
Differences to the publishers' code, besides those in
vit_jax/self_supervised/mae.py:
- Class and mask token have no weight decay (there: all arrays of more than one
  dimension have).
- Another data set than ImageNet has a batch of the largest power of two up to
  its number of images, at most 4,096. The warm-up takes 40 epochs, but at most
  a tenth of the run.

Cost of 800 epochs, FLOPs of training: B/16 60.1 exaFLOPs, L/16 128, H/14 299.
A step of L/16 has a third of the FLOPs of one that encodes all patches: the
encoder alone has a quarter, and the decoder, which computes all patches, a
twelfth. By the planner's estimate the time falls less: on TPU
v5e:16x16 with --config.model.scan=true, 84,642 images/s, 1.09 times those of
vit_l16. With 16 images a chip, a step's 35.6 GB of memory traffic take longer
than its 2.0 TFLOP (1.5 GiB a chip, 48.4 ms; jax 0.12.0.1, libtpu 0.0.50.1). On
v5p:4x4x8 it has 153,297 images/s (3.0 GiB a chip, 26.7 ms).
Result: not yet run. The publishers' top-1 on ImageNet after 1,600 epochs,
fine-tuned and with a linear probe: B/16 83.6 and 68.0, L/16 85.9 and 75.8, H/14
86.9 and 76.6. L/16 after 800 epochs, fine-tuned: 85.4 with standardised pixels,
84.9 with --config.objective.target=pixels.
"""

from vit_jax.config import (
  arguments,
  check_choices,
  defaults,
  fewshot_evals,
  recipe,
  whole_number,
)

# Model -> images of a microbatch on each device.
MODELS = {"B/16": 128, "L/16": 128, "H/14": 64}
ARGUMENTS = {
  "model": "B/16",
  "dataset": "imagenet2012",
  "epochs": "800",
  "steps": "",
}
IMAGENET = 1_281_167  # images


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"model": MODELS})
  if args["dataset"] == "glyphs":
    c = recipe("glyphs")
    c.evals = {"fewshot": c.evals["fewshot"]}
    c.objective.kind = "mae"
    c.objective.decoder_width, c.objective.decoder_depth = 64, 2
    c.objective.decoder_heads = 4
    if args["steps"]:
      c.total_steps = whole_number(args, "steps")
    return c
  return _paper(args)


def _paper(args: dict[str, str]):
  c = defaults()
  c.data.dataset, c.data.split = args["dataset"], "train"
  num_images = IMAGENET
  if args["dataset"] != "imagenet2012":
    from vit_jax.data import sources  # takes seconds to import

    source = sources.Sources().inspect(args["dataset"], "train")
    num_images = source.num_examples
  c.model.variant = args["model"]
  c.model.posemb = "sincos2d"
  c.model.gelu = "erf"
  c.model.dtype = "bfloat16"
  c.objective.kind = "mae"
  c.data.ops = "decode|random_resized_crop(224, 0.2, 1.0)|flip_lr"
  c.data.batch_size = batch = min(4096, 2 ** (num_images.bit_length() - 1))
  epochs = whole_number(args, "epochs")
  steps = epochs * num_images // batch
  if args["steps"]:
    c.total_steps = steps = whole_number(args, "steps")
  else:
    c.total_epochs = float(epochs)
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = MODELS[args["model"]]  # of each

  c.optim.lr = 1.5e-4 * batch / 256
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = min(40 * num_images // batch, steps // 10)
  c.optim.beta2 = 0.95
  c.optim.weight_decay = 0.05
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 100_000
  if args["dataset"] == "imagenet2012":
    c.evals = fewshot_evals(
      ops="decode|resize(256)|central_crop(224)",
      shots=(1, 5, 10, 25),
      seeds=(0, 1, 2),
      l2=(1024.0,),
      every_steps=10_000,
    )
  return c

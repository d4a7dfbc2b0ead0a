"""ViT-B/16 pre-trained without labels: masked patch prediction.

Half of the patches are corrupted, and their mean colours, one of 512, are
predicted: section 4.6 and appendix B.1.2 of arXiv:2010.11929. The paper trains
on JFT-300M; it reports gains on ImageNet, too. It does not state weight decay
and dropout; here they are 0. It does not state the heads and the bounds of the
colours; here heads are linear, and a channel has 8 equal steps
(vit_jax/objectives/masked_patch.py).

Run: vit-jax train --config=masked_patch:imagenet21k
The argument is imagenet21k, imagenet2012, folder:/path/to/images, or glyphs
(the small model of configs/glyphs.py on the same letters and symbols).
For the first two, few-shot accuracy is scored as in configs/vit.py.
Cost: 432.0 exaFLOPs; by the planner's estimate 1,346 chip-hours of TPU v5e (256
chips, 18.9 ms a step; jax 0.12.0.1, libtpu 0.0.50.1).
Result on ImageNet or a folder: not yet run. (Paper: 79.9 % on ImageNet after
fine-tuning; 77.9 % from scratch.)
After a comma: target (mean_color, small or pixels) and steps; in the paper the
gains hardly grow after 100,000 steps:
--config=masked_patch:imagenet2012,target=small,steps=100000
(Paper: small and mean_color are about equal, pixels is slightly worse.)

Run: vit-jax train --config=masked_patch:glyphs
This has as many steps as the supervised configs/glyphs.py. The glyphs are grey,
with 8 colours, and 41 % of the patches have the most frequent one.
Result (8 minutes on two cores of an AMD EPYC that other programs used): 71 % of
the corrupted patches are right in the last batch. Ridge on 10 images a class of
scanned digits: 81.9 % (supervised: 93.8; random weights: 62.1; pixels: 79.5).
"""

from vit_jax.config import (
  arguments,
  defaults,
  fewshot_evals,
  recipe,
  whole_number,
)
from vit_jax.options import nearest

SPLITS = {"imagenet21k": "full[51200:]", "imagenet2012": "train"}


def get_config(arg: str = "imagenet21k"):
  dataset, _, rest = arg.partition(",")
  args = arguments(rest, {"target": "mean_color", "steps": ""})
  if dataset == "glyphs":
    c = recipe("glyphs")
    c.evals = {"fewshot": c.evals["fewshot"]}
  else:
    c = _paper(dataset)
  c.objective.kind = "masked_patch"
  c.objective.target = args["target"]
  if args["steps"]:
    c.total_steps = whole_number(args, "steps")
  return c


def _paper(dataset: str):
  if dataset not in SPLITS and not dataset.startswith("folder:"):
    raise ValueError(
      f"got data set {dataset!r}, expected {', '.join(SPLITS)}, glyphs or"
      f" folder:/path.{nearest(dataset, (*SPLITS, 'glyphs'))}"
    )
  c = defaults()
  c.model.variant = "B/16"
  c.model.dtype = "bfloat16"
  c.data.dataset, c.data.split = dataset, SPLITS.get(dataset, "train")
  c.data.ops = "decode_inception_crop(224)|flip_lr"
  c.data.batch_size = 4096
  c.total_steps = 1_000_000  # 14 epochs of JFT-300M, 290 of ImageNet-21k
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = 64  # of each

  c.optim.lr = 2e-4
  c.optim.warmup_steps = 10_000
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 100_000
  if dataset in SPLITS:
    c.evals = fewshot_evals(
      ops="decode|resize(256)|central_crop(224)",
      shots=(1, 5, 10, 25),
      seeds=(0, 1, 2),
      l2=(1024.0,),
      every_steps=10_000,
    )
  return c

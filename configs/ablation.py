"""Ablations: Tables 7 and 8, and appendix D, of arXiv:2010.11929.

Run: vit-jax train \
  --config=ablation:posemb=learn2d,posemb_at=shared
Arguments: model (of MODELS), dataset (of DATASETS), posemb (as in
config.model), posemb_at (as in config.model), pool (token or gap), optimizer
(adam, or sgd for ResNets), depth (blocks), width (of a token; a head has 64),
mlp_dim (hidden width), patch (pixels per side), lr (peak learning rate; by
default that of the model).

The recipe is that of configs/comparison.py; all models train equally long. The
paper trains on JFT-300M, for 7 epochs in Table 7; other tables do not state the
length. Therefore expect the order and the differences of the numbers below, not
their values. The score is 5-shot accuracy on ImageNet. Result: not yet run.

Positions (D.4, Table 8; B/16, 5-shot accuracy on ImageNet; posemb_at)
  posemb      stem     blocks   shared
  none        0.61382
  learn       0.64206  0.63964  0.64292
  learn2d     0.64001  0.64046  0.64022
  relative    0.64032
The paper does not state these choices: the class token has its own position in
learn, is the first of the sequence in relative, and has no position in learn2d.
With dropout (which is off here), the tokens' dropout comes before positions
that are added in blocks.

Pooling (D.3, Figure 9): the mean with a linear head (pool=gap) is as good as
the class token with a tanh layer (pool=token) if the learning rate is tuned.
The paper gives no rates; try lr=4e-4, 8e-4 and 1.6e-3 for both.

Optimizer of ResNets (D.1, Table 7; fine-tuned accuracy, %)
                        ImageNet  CIFAR-10  CIFAR-100  Pets   Flowers  mean
  model=R50x1   adam    77.54     97.67     86.07      91.11  94.26    89.33
                sgd     78.24     97.46     85.17      91.00  92.06    88.79
  model=R152x2  adam    84.97     99.06     92.05      95.37  98.62    94.01
                sgd     84.37     99.07     91.06      94.79  99.32    93.72
optimizer=sgd has BiT's numbers (arXiv:1912.11370, section 3.3): learning rate
0.03 x batch / 256, momentum 0.9, 5,000 steps of warm-up, division by 10 after
30, 60 and 80 of 90 epochs (on JFT-300M 10, 23, 30 and 37 of 40), and no
clipping. BiT's L2 penalty of 1e-4, which momentum accumulates ten times, is
here a weight decay of 1e-3 after the momentum.

Scaling (D.2, Figure 8): model=figure8, 8 blocks of width 1024 with an MLP of
2048 on patches of 32, with another depth, width, mlp_dim or patch. The paper's
curves have no numbers. Depth helps most, with less gain after 16 blocks; width
helps least; smaller patches help without more parameters. The paper does not
state heads (here 16 of 64) and learning rate (here that of L/32).

Masked patches (4.6, B.1.2): configs/masked_patch.py with target and steps.

Cost, in 10^18 FLOPs, on ImageNet-21k: B/16 45, R50x1 11, R152x2 117, figure8 9.
"""

from vit_jax.config import (
  arguments,
  check_choices,
  number,
  recipe,
  whole_number,
)
from vit_jax.families import family

MODELS = ("B/16", "R50x1", "R152x2", "figure8")
DATASETS = ("imagenet21k", "imagenet2012")
SIZES = ("depth", "width", "mlp_dim", "patch")
ARGUMENTS = {
  "model": "B/16",
  "dataset": "imagenet21k",
  "posemb": "",
  "posemb_at": "",
  "pool": "",
  "optimizer": "adam",
  **dict.fromkeys(SIZES, ""),
  "lr": "",
}
OF_TRANSFORMERS = ("posemb", "posemb_at", "pool", *SIZES)


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(
    args,
    {
      "model": MODELS,
      "dataset": DATASETS,
      "optimizer": ("adam", "sgd"),
      "pool": ("", "token", "gap"),
    },
  )
  model = "L/32" if args["model"] == "figure8" else args["model"]
  is_resnet = family(model) != "vit"
  if is_resnet and (given := [k for k in OF_TRANSFORMERS if args[k]]):
    raise ValueError(
      f"got {given[0]}={args[given[0]]} for model={model}, expected it for"
      " Transformers alone."
    )
  if not is_resnet and args["optimizer"] == "sgd":
    raise ValueError(
      f"got optimizer=sgd for model={args['model']}, expected a ResNet, R50x1"
      " or R152x2."
    )
  c = recipe(f"comparison:model={model},dataset={args['dataset']}")
  if args["model"] == "figure8":
    c.model.depth, c.model.mlp_dim = 8, 2048
  _sizes(c, args, model)
  for name in ("posemb", "posemb_at"):
    if args[name]:
      c.model[name] = args[name]
  if args["pool"] == "gap":
    c.model.pool = "gap"
    c.model.pre_logits = False
  if args["optimizer"] == "sgd":
    c.optim.name = "sgd"
    c.optim.lr = 0.03 * c.data.batch_size / 256
    c.optim.warmup_steps = 5000
    c.optim.schedule = "step"
    c.optim.decay_at = (30 / 90, 60 / 90, 80 / 90)
    c.optim.weight_decay = 1e-3
    c.optim.end_lr = 0.0
    c.optim.clip_norm = None
  if args["lr"]:
    c.optim.lr = number(args, "lr")
  return c


def _sizes(c, args, model: str) -> None:
  sizes = {k: whole_number(args, k) for k in SIZES if args[k]}
  for key, value in sizes.items():
    if key == "patch":
      c.model.variant = f"{model.split('/')[0]}/{value}"
    else:
      c.model[key] = value
  if "width" in sizes:
    c.model.num_heads = max(1, sizes["width"] // 64)

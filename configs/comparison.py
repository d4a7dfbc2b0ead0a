"""ResNets, hybrids and Transformers on equal terms: section 4.4, figure 5.

Run: vit-jax train \
  --config=comparison:model=R50x1,dataset=imagenet21k
Arguments: model (of LEARNING_RATES), dataset (of EPOCHS).
The recipe is that of Table 3 of arXiv:2010.11929 for JFT-300M, which is not
public: Adam also for the ResNets, batch 4096, a linear decay, weight decay 0.1,
no dropout, and no clipping, which the table states only for ImageNet. R200x3 is
not in the table.
The length differs. On JFT-300M 7 epochs are 518,000 steps, with 2 % of warm-up
(10,000 steps). 7 epochs of ImageNet-21k would be 24,175 steps, and of ImageNet
2,189, less than the warm-up. Therefore the length is that of Table 3 for the
data set (for ImageNet-21k the shorter one), with the same warm-up: 10 % of
about 100,000 steps. All models train equally long; the paper trains H/14, and
some other models of figure 5, twice as long.
Few-shot accuracy is scored as in configs/vit.py.
Cost on imagenet21k: 10.5 exaFLOPs (R50x1) to 426.1 (H/14); hours were not
estimated.
On ImageNet the paper's recipe has more regularisation (dropout 0.1, weight
decay 0.3), so compare these scores only with each other.
Result: not yet run.
"""

from vit_jax.config import arguments, check_choices, recipe
from vit_jax.families import family

# Model -> peak learning rate.
LEARNING_RATES = {
  "B/32": 8e-4,
  "B/16": 8e-4,
  "L/32": 6e-4,
  "L/16": 4e-4,
  "H/14": 3e-4,
  "R50x1": 1e-3,
  "R50x2": 1e-3,
  "R101x1": 8e-4,
  "R152x1": 6e-4,
  "R152x2": 6e-4,
  "R50+B/32": 8e-4,
  "R50+B/16": 8e-4,
  "R50+L/32": 2e-4,
  "R50+L/16": 4e-4,
}
# Data set -> passes over it.
EPOCHS = {
  "imagenet21k": 30.0,  # 30 * 14,145,922 / 4096 = 103,608 steps
  "imagenet2012": 300.0,  # 300 * 1,281,167 / 4096 = 93,835 steps
}
ARGUMENTS = {"model": "R50x1", "dataset": "imagenet21k"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"model": LEARNING_RATES, "dataset": EPOCHS})
  model, dataset = args["model"], args["dataset"]
  # Batch, preprocessing, warm-up, sigmoid and scores are those of Table 3.
  c = recipe(f"vit:B/16,{dataset}")
  c.model.name, c.model.variant = family(model), model
  c.model.pre_logits = family(model) == "vit"
  c.model.dropout = 0.0
  c.total_epochs = EPOCHS[dataset]
  c.optim.lr = LEARNING_RATES[model]
  c.optim.schedule = "linear"
  c.optim.weight_decay = 0.1
  c.optim.clip_norm = None
  # H/14 is the largest model; the maps of ResNets take the most memory.
  c.optim.microbatch = 64 if model[0] in "BL" else 16
  return c

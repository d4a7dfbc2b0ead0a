"""ResNets, hybrids and Transformers on equal terms: section 4.4, figure 5.

Run: vit-jax train \
  --config=comparison:model=R50x1,dataset=imagenet21k
Arguments: model (of LEARNING_RATES), dataset (of EPOCHS).
The recipe is that of Table 3 of arXiv:2010.11929 for JFT-300M, which is not
public: Adam for the ResNets, too, batch 4096, a linear decay, weight decay 0.1,
no dropout, and no clipping, which the table states for ImageNet alone. R200x3
is not in that table.
The length is not that of JFT-300M. There, 7 epochs are 518,000 steps, of which
the 10,000 of warm-up are 2 %; 7 epochs of ImageNet-21k are 24,175, and of
ImageNet 2,189, less than the warm-up. Instead, the length is that in Table 3
for the data set itself (for ImageNet-21k the shorter of its two), with the same
warm-up: 10 % of about 100,000 steps. Every model is trained for as long; the
paper trains H/14, and in figure 5 some others, twice as long.
Few-shot accuracy is scored as in configs/vit.py.
Cost on imagenet21k: 10.5 exaFLOPs (R50x1) to 426.1 (H/14); hours
were not estimated.
On ImageNet the paper's own recipe regularises more (dropout 0.1, weight decay
0.3), so these scores compare with each other only.
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

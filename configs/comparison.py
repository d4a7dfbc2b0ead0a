"""ResNets, hybrids and Transformers on equal terms: section 4.4, figure 5.

Run: python -m vit_jax.train \
  --config=configs/comparison.py:model=R50x1,dataset=imagenet21k
Arguments: model (of LEARNING_RATES), dataset (imagenet21k, imagenet2012).
The recipe is that of Table 3 of arXiv:2010.11929 for JFT-300M, which is not
public: 7 epochs (H/14: 14), Adam for the ResNets, too, batch 4096, a linear
decay, weight decay 0.1, no dropout. R200x3 is not in that table.
Result: not yet run.
"""

from vit_jax.recipes import arguments, table3
from vit_jax.variants import family, nearest

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
ARGUMENTS = {"model": "R50x1", "dataset": "imagenet21k"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  model = args["model"]
  if model not in LEARNING_RATES:
    raise ValueError(
      f"got model={model}, expected one of {', '.join(LEARNING_RATES)}."
      + nearest(model, LEARNING_RATES)
    )
  c = table3(model, args["dataset"])
  c.model.name = family(model)
  c.model.pre_logits = c.model.name == "vit"
  c.model.dropout = 0.0
  c.total_epochs = 14.0 if model == "H/14" else 7.0
  c.optim.lr = LEARNING_RATES[model]
  c.optim.schedule = "linear"
  c.optim.weight_decay = 0.1
  c.optim.clip_norm = None
  return c

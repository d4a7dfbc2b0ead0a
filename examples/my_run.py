"""A run in which everything is our own.

vit-jax train --config=my_run.py --workdir=runs/mine
vit-jax train --config=my_run.py:runs/mine --workdir=runs/compared
"""

from vit_jax.config import defaults


def get_config(other=""):  # a run to compare with
  c = defaults()
  c.model.name = "my_lab.plain:Plain"
  c.objective.kind = "my_lab.twins:Twins"
  c.data.dataset, c.data.split = "my_lab.stripes:Stripes", "train"
  c.data.ops = "decode|inception_crop(16)|my_lab.fade:Fade(0.3)"
  c.data.batch_size = 32
  c.optim.name = "my_lab.normed:normed_adam(limit=0.5)"
  c.optim.lr, c.optim.warmup_steps, c.optim.weight_decay = 1e-3, 4, 0.05
  c.callbacks = ("my_lab.cosine:Cosine(decay=0.5)",)
  c.total_steps, c.log_steps, c.checkpoint.every_steps = 12, 2, 4
  split = {"split": "test", "ops": "decode|resize(16)"}
  c.evals = {
    "knn": {"kind": "knn", "train_split": "train", "every_steps": 4, **split},
  }
  if other:
    kind = "my_lab.agreement:Agreement"
    c.evals["agreement"] = {"kind": kind, "other": other, **split}
  return c

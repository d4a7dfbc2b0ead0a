"""A small ViT pre-trained on rendered letters and symbols, 32 px.

Run: python -m vit_jax.train --config=configs/glyphs.py
"""

from vit_jax.config import defaults


def get_config():
  c = defaults()
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 96, 6
  c.model.mlp_dim, c.model.num_heads = 384, 3
  c.model.pool = "gap"
  c.data.dataset = "glyphs/size=32,count=30000,seed=0"
  c.data.batch_size = 128
  c.data.ops = "decode|resize(32)"
  c.total_steps = 2000
  c.optim.lr = 1e-3
  c.optim.warmup_steps = 200
  c.optim.weight_decay = 0.05
  c.optim.clip_norm = 1.0
  c.checkpoint.every_steps = 500
  c.evals = {
    "glyphs": {
      "kind": "classification",
      "split": "validation",
      "ops": "decode|resize(32)",
      "every_steps": 500,
    },
    "digits": {
      "kind": "fewshot",
      "dataset": "digits",
      "ops": "decode|resize(32)",
      "l2": 16.0,
      "baselines": True,
      "every_steps": 500,
    },
  }
  return c

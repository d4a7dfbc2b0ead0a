"""Fine-tunes the glyph model on real handwritten digits at 48 px.

Run: python -m vit_jax.train --config=configs/digits_finetune.py:init=runs/glyphs
Without an argument the same steps are trained from scratch.
"""

from vit_jax.config import defaults


def get_config(arg: str = ""):
  key, _, init = arg.partition("=")
  if arg and key != "init":
    raise ValueError(f"got argument {key!r}, expected init=<run>.")
  c = defaults()
  c.init = init or None
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 96, 6
  c.model.mlp_dim, c.model.num_heads = 384, 3
  c.model.pool = "gap"
  c.data.dataset = "digits"
  c.data.batch_size = 128
  c.data.ops = "decode|resize(48)"
  c.total_steps = 300
  c.optim.name = "sgd"
  c.optim.momentum = 0.9
  c.optim.lr = 0.03
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 30
  c.optim.clip_norm = 1.0
  c.log_steps = 10
  c.evals = {
    "digits": {
      "kind": "classification",
      "split": "test",
      "ops": "decode|resize(48)",
      "every_steps": 50,
    }
  }
  return c

"""A run of seconds for `--config`: 15,626 parameters, rendered digits, 32 px.

Run: vit-jax train --config=tests/tiny_run.py --workdir=DIR
"""

from vit_jax.config import defaults


def get_config():
  c = defaults()
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.model.pool = "gap"
  c.data.dataset = "digits"
  c.data.ops = "decode|resize(32)"
  c.data.batch_size = 32
  c.total_steps = 200
  c.optim.lr = 1e-3
  c.optim.warmup_steps = 10
  c.checkpoint.every_steps = 20
  c.checkpoint.keep_last = 3
  c.log_steps = 5
  c.evals = {
    "digits": {
      "kind": "classification",
      "split": "test",
      "ops": "decode|resize(32)",
      "every_steps": 50,
    },
  }
  return c

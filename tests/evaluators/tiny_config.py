"""One block of width 32 on ImageNet at 16 px, two steps."""

import tiny

from vit_jax.config import defaults, to_dict


def get_config():
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=2, model__depth=1)))
  return c

"""Schedule and optimizer of big_vision's `train_vit_g.py`.

config.optim.schedule = "vit_g:rsqrt(timescale=100, cooldown_steps=60)"
config.optim.name = "vit_g:adafactor(head=100.0)"
"""

import jax
import jax.numpy as jnp
import optax


def rsqrt(lr, warmup_steps, total_steps, timescale, cooldown_steps):
  """Returns step -> lr / sqrt(1 + s / timescale), s steps after the warm-up.

  The rate rises linearly from 0, and falls linearly to 0 in the last steps.
  """

  def rate(step):
    since = jnp.maximum(step - warmup_steps, 0)
    rise = jnp.minimum(step / warmup_steps, 1.0)
    fall = jnp.minimum((total_steps - step) / cooldown_steps, 1.0)
    return lr * rise * fall / jnp.sqrt(1.0 + since / timescale)

  return rate


def adafactor(weight_decay, mask, head=1.0, cap=0.999):
  """Returns Adafactor with momentum and decay, without a learning rate.

  Args:
    weight_decay: Decay of kernels, multiplied by the learning rate.
    mask: Parameters -> tree of booleans, True for kernels.
    head: Factor of the decay of the head's kernel.
    cap: The largest decay of the second moment.
  """

  def decay(step, exponent):
    return jnp.minimum(cap, 1.0 - (step + 1.0) ** -exponent)

  def head_mask(params):
    others = jax.tree.map(lambda _: False, params)
    return others | {"head": mask(params["head"])}

  return optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=32, decay_rate_fn=decay),
    optax.ema(0.9, debias=False),
    optax.add_decayed_weights(weight_decay, mask),
    optax.add_decayed_weights(weight_decay * (head - 1.0), head_mask),
  )

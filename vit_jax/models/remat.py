"""What the forward pass of a block keeps for its backward pass."""

from collections.abc import Callable

import jax

from vit_jax.families.vit import ViTConfig

# "dots" keeps the products with weights; those of attention, which have batch
# dimensions and grow with the square of the number of tokens, are recomputed.
POLICIES = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}

# Results of a block that are kept in a scan; `checkpoint_name` gives the names.
KEPT = ("query", "key", "value", "attended", "after_attention", "hidden")
_is_kept_by_name = jax.checkpoint_policies.save_only_these_names(*KEPT)


def policy(options: ViTConfig) -> Callable[..., bool] | None:
  """Returns the policy of `jax.checkpoint` for a block; None: none is needed.

  Without `remat` XLA chooses what it keeps of blocks in a loop. Of blocks in a
  scan jax would keep all that it computes, copies in float32 and masks
  included. So what is kept is named, and sums are kept, those of the norms
  among them, and what cuDNN's attention returns.
  """
  if options.scan and options.remat == "none":
    return _is_kept_in_scan
  return POLICIES[options.remat]


def _is_kept_in_scan(primitive, *args, **params) -> bool:
  return (
    primitive is jax.lax.reduce_sum_p
    # Inside jax's own custom gradient, where no name of ours reaches.
    or primitive.name.startswith("dot_product_attention_fwd")
    or _is_kept_by_name(primitive, *args, **params)
  )

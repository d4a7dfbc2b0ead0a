import flax.linen as nn


class Bag(nn.Module):
  options: object
  num_classes: int

  @nn.compact
  def __call__(self, images, is_training=False, records=None):
    patch = (self.options.patch,) * 2
    x = nn.Conv(self.options.width, patch, patch, "VALID", name="stem")(images)
    x = nn.gelu(x).mean((1, 2))
    out = {"pre_logits": x}
    if self.num_classes:
      x = nn.Dense(self.num_classes, name="head")(x)
      x *= 1 if self.options.scale is None else self.options.scale
    out["logits"] = x
    return x, out

"""A family with names of its own: a plain Transformer in one file.

The class attributes say where its parts are. Without one of them, the feature
that reads it is refused with the option's name.
"""

import dataclasses

from vit_jax.families import ModelConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Plain(ModelConfig):
  """A plain Transformer, with the mean of the tokens before the head."""

  variant: str = option("plain", "name for messages")
  width: int = option(64, "width of a token")
  depth: int = option(4, "number of blocks")
  heads: int = option(4, "heads of an attention; must divide width")
  patch: int = option(4, "side of a patch, pixels")

  pool = "gap"
  STEM = r"patches/.*|positions"
  PATCHES = "patches"
  POSITIONS = {"positions": "grid"}
  BLOCKS = "block_{}"
  MATRICES = {
    r"attention/(query|key|value)/kernel": (1, 2),
    r"attention/out/kernel": (2, 1),
    r"mlp_(in|out)/kernel": (1, 1),
  }
  BEHIND_BLOCKS = ("norm", "classifier")
  HEADS = r"classifier/"
  ATTENTION = "block_{}/attention/attention_weights"
  SHARDING = (
    (r"(query|key|value)/kernel", ("fsdp", "tensor", None)),
    (r"attention/out/kernel", ("tensor", None, "fsdp")),
    (r"mlp_in/kernel", ("fsdp", "tensor")),
    (r"mlp_out/kernel", ("tensor", "fsdp")),
  )

  def errors(self):
    yield from super().errors()
    if self.width % self.heads:
      yield (
        f"config.model.heads: got {self.heads}, expected a divisor of"
        f" config.model.width={self.width}."
      )

  def size_errors(self, image_size):
    if any(side % self.patch for side in image_size):
      yield (
        f"config.data.ops: got images of {image_size[0]}x{image_size[1]},"
        f" expected multiples of config.model.patch={self.patch}."
      )

  @property
  def stride(self):
    return self.patch

  def grid(self, image_size):
    return image_size[0] // self.patch, image_size[1] // self.patch

  def num_tokens(self, image_size):
    rows, columns = self.grid(image_size)
    return rows * columns

  def forward_macs(self, image_size, num_classes):
    tokens, width = self.num_tokens(image_size), self.width
    block = tokens * 12 * width**2 + 2 * tokens**2 * width
    stem = tokens * self.patch**2 * self.channels * width
    return stem + self.depth * block + width * num_classes

  def build(self, num_classes):
    import flax.linen as nn

    options, normal = self, nn.initializers.normal(0.02)

    class Network(nn.Module):
      @nn.compact
      def __call__(self, images, *, is_training=False, records=None):
        side, width = (options.patch,) * 2, options.width
        x = nn.Conv(width, side, side, "VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, width)
        x += self.param("positions", normal, (1, *x.shape[1:]))
        for i in range(options.depth):
          x = Block(name=f"block_{i}")(x)
        out = {"encoded": nn.LayerNorm(name="norm")(x)}
        out["pre_logits"] = x = out["encoded"].mean(1)
        if num_classes:
          x = nn.Dense(num_classes, name="classifier")(x)
        return x, out | {"logits": x}

    class Block(nn.Module):
      @nn.compact
      def __call__(self, x):
        dtype, width = options.dtype, options.width
        attention = nn.MultiHeadDotProductAttention(
          options.heads, dtype=dtype, name="attention"
        )
        x += attention(nn.LayerNorm(dtype=dtype)(x), sow_weights=True)
        y = nn.LayerNorm(dtype=dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=dtype, name="mlp_in")(y))
        return x + nn.Dense(width, dtype=dtype, name="mlp_out")(y)

    return Network()

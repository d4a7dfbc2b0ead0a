"""A Vision Transformer without vit_jax, for its parameters.

flax's own attention has the names and shapes of vit_jax's.
"""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


class Mlp(nn.Module):
  hidden: int

  @nn.compact
  def __call__(self, x):
    y = nn.gelu(nn.Dense(self.hidden)(x), approximate=True)  # tanh
    return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
  heads: int
  hidden: int

  @nn.compact
  def __call__(self, x):
    y = nn.LayerNorm(name="LayerNorm_0")(x)  # epsilon 1e-6, as in vit_jax
    x = x + nn.MultiHeadDotProductAttention(
      self.heads, name="MultiHeadDotProductAttention_0"
    )(y)
    y = nn.LayerNorm(name="LayerNorm_1")(x)
    return x + Mlp(self.hidden, name="MlpBlock_0")(y)


class Positions(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.normal(0.02)
    return x + self.param("pos_embedding", init, (1, *x.shape[1:]))


class Encoder(nn.Module):
  depth: int
  heads: int
  hidden: int

  @nn.compact
  def __call__(self, x):
    x = Positions(name="posembed_input")(x)
    for i in range(self.depth):
      x = Block(self.heads, self.hidden, name=f"encoderblock_{i}")(x)
    return nn.LayerNorm(name="encoder_norm")(x)


class ViT(nn.Module):
  patch: int
  width: int
  depth: int
  heads: int
  hidden: int
  classes: int
  pool: str = "token"  # or "gap": the mean of the patches, no class token

  @nn.compact
  def __call__(self, images):
    side = (self.patch, self.patch)
    x = nn.Conv(self.width, side, side, "VALID", name="embedding")(images)
    x = x.reshape(x.shape[0], -1, self.width)
    if self.pool == "token":
      cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
      x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
    x = Encoder(self.depth, self.heads, self.hidden, name="Transformer")(x)
    x = x.mean(axis=1) if self.pool == "gap" else x[:, 0]
    return nn.Dense(self.classes, name="head")(x)


def restore(folder, model, images):
  """Returns the parameters in an Orbax checkpoint, on one device."""
  # Without a sharding, Orbax asks for the devices that wrote the file.
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes
  )
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(pathlib.Path(folder).absolute(), like)

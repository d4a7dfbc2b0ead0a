"""Biases of scores by offset, against timm's BEiT."""

import jax
import numpy as np
import pytest
import torch_libraries
from flax.traverse_util import unflatten_dict

from vit_jax.families import model_config
from vit_jax.models import build, resample
from vit_jax.zoo.models import relative_bias

GRID, WIDTH, HEADS = (3, 5), 32, 2


def test_rows_are_in_reach_and_mirrored():
  rows = relative_bias.rows(GRID)
  patches = rows[1:, 1:]
  offsets = resample.num_bias_rows(GRID) - 3
  assert sorted({*patches.ravel()}) == list(range(offsets))
  # Query and key exchanged, the offset has the other sign.
  np.testing.assert_array_equal(patches + patches.T, offsets - 1)
  assert {*rows[0, 1:]} == {offsets} and {*rows[1:, 0]} == {offsets + 1}
  assert rows[0, 0] == offsets + 2


def ours(state):
  """The parameters of timm's model under our names."""
  state = {k: v.numpy() for k, v in state.items()}
  heads = (HEADS, WIDTH // HEADS)

  def norm(name):
    return {"scale": state[name + ".weight"], "bias": state[name + ".bias"]}

  def dense(name):
    return {"kernel": state[name + ".weight"].T, "bias": state[name + ".bias"]}

  embedding = state["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
  params = {
    "cls": state["cls_token"],
    "embedding": {
      "kernel": embedding,
      "bias": state["patch_embed.proj.bias"],
    },
    "pooled_norm": norm("fc_norm"),
    "head": dense("head"),
  }
  for i in range(2):
    block = f"blocks.{i}."
    qkv = np.split(state[block + "attn.qkv.weight"].T, 3, axis=1)
    attention = {
      name: {"kernel": kernel.reshape(WIDTH, *heads)}
      for name, kernel in zip(("query", "key", "value"), qkv, strict=True)
    }
    for name in ("query", "value"):
      bias = state[block + f"attn.{name[0]}_bias"]
      attention[name]["bias"] = bias.reshape(heads)
    out = dense(block + "attn.proj")
    out["kernel"] = out["kernel"].reshape(*heads, WIDTH)
    table = state[block + "attn.relative_position_bias_table"]
    params[f"Transformer/encoderblock_{i}"] = {
      "LayerNorm_0": norm(block + "norm1"),
      "LayerNorm_1": norm(block + "norm2"),
      "LayerScale_0": {"scale": state[block + "gamma_1"]},
      "LayerScale_1": {"scale": state[block + "gamma_2"]},
      "MlpBlock_0": {
        "Dense_0": dense(block + "mlp.fc1"),
        "Dense_1": dense(block + "mlp.fc2"),
      },
      "MultiHeadDotProductAttention_0": attention
      | {"out": out, "relative_bias": table},
    }
  return unflatten_dict(params, sep="/")


@pytest.mark.slow
def test_equals_timm():
  torch = torch_libraries.load("torch")
  timm = torch_libraries.load("timm.models.beit")
  net = timm.Beit(
    img_size=(12, 20),
    patch_size=4,
    embed_dim=WIDTH,
    depth=2,
    num_heads=HEADS,
    num_classes=5,
    use_abs_pos_emb=False,
    use_rel_pos_bias=True,
    init_values=0.1,
  ).eval()
  rng = np.random.default_rng(0)
  for name, leaf in net.named_parameters():
    x = rng.normal(float(name.startswith("norm")), 0.3, tuple(leaf.shape))
    leaf.data = torch.from_numpy(x.astype("f"))
  images = rng.uniform(-1, 1, (2, 12, 20, 3)).astype("f")
  with torch.no_grad():
    expected = net(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
  options = model_config(
    "modern",
    variant="B/4",
    width=WIDTH,
    depth=2,
    mlp_dim=4 * WIDTH,
    num_heads=HEADS,
    posemb="relative_bias",
    layer_scale=0.1,
    qkv_bias="no_key",
    pool="gap",
    final_norm="pooled",
    gelu="erf",
  )
  params = ours(net.state_dict())
  with jax.default_matmul_precision("highest"):
    got, _ = jax.jit(build(options, 5).apply)({"params": params}, images)
  np.testing.assert_allclose(
    got, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
  )

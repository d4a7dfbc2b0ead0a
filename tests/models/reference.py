"""The Vision Transformers of both families in numpy, in float64.

Written from the papers, token by token where that is plainer. What a block has
is decided by its parameters: a gate, a norm, a scale.
"""

import jax
import numpy as np
import scipy.special


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


ACTIVATIONS = {
  "tanh": lambda x: (
    x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
  ),
  "erf": lambda x: x / 2 * (1 + scipy.special.erf(x / 2**0.5)),
  "quick": lambda x: x * sigmoid(1.702 * x),
}


def normed(x, norm, eps):
  mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(variance + eps) * norm["scale"] + norm["bias"]


def linear(x, layer, dims="d,de->e"):
  left, right = dims.split(",")
  y = np.einsum(f"bn{left},{right.replace('->', '->bn')}", x, layer["kernel"])
  return y + layer.get("bias", 0)


# Positions.


def sincos2d(grid, width):
  """Sines and cosines of x, then those of y: [n, d]."""
  frequencies = 10_000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
  return np.array(
    [
      [f(v * w) for v in (x, y) for f in (np.sin, np.cos) for w in frequencies]
      for y, x in np.ndindex(grid)
    ]
  )


def table_of(tables, grid):
  """A learned table [n, d]; or that of halves for columns (x) and rows (y)."""
  if "pos_embedding" in tables:
    return tables["pos_embedding"][0]
  of_x, of_y = tables["pos_embedding_x"][0], tables["pos_embedding_y"][0]
  return np.array([np.append(of_x[x], of_y[y]) for y, x in np.ndindex(grid)])


def added(x, table):
  """Adds a table to the last tokens: class tokens may have no position."""
  x = x.copy()
  x[:, x.shape[1] - len(table) :] += table
  return x


def turned(x, kind, grid):
  """Rotates patches [b, n, heads, d] as complex numbers, one by one."""
  n = x.shape[-1]
  x = np.array(x)
  for i, j in np.ndindex(grid):
    if kind == "dinov3":
      periods = 100 ** (np.arange(n // 4) / (n / 4))
      y, c = (2 * (k + 0.5) / m - 1 for k, m in zip((i, j), grid, strict=True))
      angle = 2 * np.pi * np.concatenate([y / periods, c / periods])
    else:
      frequencies = 10_000 ** (-np.arange(n // 4) / (n / 4))
      y, c = (16 * k / m for k, m in zip((i, j), grid, strict=True))
      angle = np.concatenate([y * frequencies, c * frequencies])
    token = x[:, i * grid[1] + j]
    halves = kind == "dinov3"
    a = token[..., : n // 2] if halves else token[..., ::2]
    b = token[..., n // 2 :] if halves else token[..., 1::2]
    pairs = (a + 1j * b) * np.exp(1j * angle)
    if halves:
      both = np.concatenate([pairs.real, pairs.imag], -1)
    else:
      both = np.stack([pairs.real, pairs.imag], -1).reshape(token.shape)
    x[:, i * grid[1] + j] = both
  return x


def biases(table, grid):
  """Biases of BEiT, score by score: [heads, queries, keys]."""
  places = [None, *np.ndindex(grid)]
  of_class = {(True, False): -3, (False, True): -2, (True, True): -1}
  result = np.zeros((table.shape[1], len(places), len(places)))
  for q, query in enumerate(places):
    for k, key in enumerate(places):
      if query is None or key is None:
        row = of_class[query is None, key is None]
      else:
        row = (query[0] - key[0] + grid[0] - 1) * (2 * grid[1] - 1)
        row += query[1] - key[1] + grid[1] - 1
      result[:, q, k] = table[row]
  return result


def of_offsets(query, offsets):
  """A key of its own for each offset of two tokens: [b, heads, n, n]."""
  n = query.shape[1]
  scores = np.zeros((len(query), query.shape[2], n, n))
  for i, j in np.ndindex(n, n):
    scores[:, :, i, j] = np.sum(query[:, i] * offsets[j - i + n - 1], -1)
  return scores


# Layers.


def attended(queries, x, layer, options, grid, absent=0.0):
  """The result and the weights; `absent` is -inf for keys that are missing."""
  query, key, value = (
    linear(tokens, layer[name], "d,dhe->he")
    for name, tokens in (("query", queries), ("key", x), ("value", x))
  )
  if options.rope and queries is x:
    num_patches = grid[0] * grid[1]
    for heads in (query, key):
      patches = turned(heads[:, -num_patches:], options.rope, grid)
      heads[:, -num_patches:] = patches
  scores = np.einsum("bqhe,bkhe->bhqk", query, key)
  if "offsets" in layer:
    scores += of_offsets(query, layer["offsets"])
  scores /= query.shape[-1] ** 0.5
  if "relative_bias" in layer:
    scores += biases(layer["relative_bias"], grid)
  weights = softmax(scores + absent)
  mixed = np.einsum("bhqk,bkhe->bqhe", weights, value)
  return linear(mixed, layer["out"], "he,hed->d"), weights


def mlp_of(x, layer, options):
  hidden = linear(x, layer["Dense_0"])
  if "Gate" in layer:
    gate = linear(x, layer["Gate"])
    hidden = gate * sigmoid(gate) * hidden
  else:
    hidden = ACTIVATIONS[options.gelu](hidden)
  if "LayerNorm_0" in layer:
    hidden = normed(hidden, layer["LayerNorm_0"], options.ln_eps)
  return linear(hidden, layer["Dense_1"])


def stem(params, images, patch):
  """Tokens [b, gh, gw, d] of images: a product for each patch."""
  b, h, w, _ = images.shape
  x = np.asarray(images, float).reshape(b, h // patch, patch, -1, patch, 3)
  layer = params["embedding"]
  return np.einsum("bhywxc,yxcd->bhwd", x, layer["kernel"]) + layer.get(
    "bias", 0
  )


def encode(options, params, tokens, keep=None):
  """Returns the intermediates, and the attention weights of each block.

  Args:
    options: The model's options.
    params: Its parameters, float64, not stacked.
    tokens: The result of `stem`.
    keep: Numbers of the patches that are there; the others get no attention.
  """
  encoder, eps = params["Transformer"], options.ln_eps
  b, grid = len(tokens), tokens.shape[1:3]
  num_patches = grid[0] * grid[1]
  x = np.reshape(tokens, (b, num_patches, -1))
  if options.posemb == "sincos2d":
    x = x + sincos2d(grid, x.shape[-1])
  front = [
    np.tile(params[k], (b, 1, 1)) for k in ("cls", "dist") if k in params
  ]
  x = np.concatenate([*front, x], 1)
  positions = [None] * options.size.depth  # of each block
  if options.posemb_at == "blocks":
    blocks = (encoder[f"encoderblock_{i}"] for i in range(len(positions)))
    positions = [table_of(p["posembed_input"], grid) for p in blocks]
  elif "posembed_input" in encoder:
    table = table_of(encoder["posembed_input"], grid)
    if options.posemb_at == "shared":
      positions = [table] * len(positions)
    else:
      x = added(x, table)
  if "registers" in params:
    registers = np.tile(params["registers"], (b, 1, 1))
    x = np.concatenate([x[:, : len(front)], registers, x[:, len(front) :]], 1)
  num_others, absent = x.shape[1] - num_patches, np.zeros(())
  chosen = lambda x: x
  if keep is not None:
    places = np.concatenate(
      [np.tile(np.arange(num_others), (b, 1)), keep + num_others], 1
    )
    absent = np.full((b, 1, 1, x.shape[1]), -np.inf)
    np.put_along_axis(absent, places[:, None, None], 0, -1)
    chosen = lambda x: np.take_along_axis(x, places[..., None], 1)
  if "pre_norm" in encoder:
    x = normed(x, encoder["pre_norm"], eps)
  out, weights = {"with_posemb": chosen(x)}, []
  for i, table in enumerate(positions):
    block = encoder[f"encoderblock_{i}"]
    scales = [
      block.get(f"LayerScale_{k}", {"scale": 1})["scale"] for k in (0, 1)
    ]
    x = x if table is None else added(x, table)
    y = normed(x, block["LayerNorm_0"], eps)
    layer = block["MultiHeadDotProductAttention_0"]
    attention, of_block = attended(y, y, layer, options, grid, absent)
    weights.append(of_block)
    after_attention = x + scales[0] * attention
    y = normed(after_attention, block["LayerNorm_1"], eps)
    mlp = scales[1] * mlp_of(y, block["MlpBlock_0"], options)
    x = after_attention + mlp
    values = {"attention": scales[0] * attention, "mlp": mlp}
    values |= {"after_attention": after_attention, "after_mlp": x}
    out[f"encoderblock_{i}"] = jax.tree.map(chosen, values)
  if "encoder_norm" in encoder:
    x = normed(x, encoder["encoder_norm"], eps)
  return out | {"encoded": chosen(x)}, np.array(weights)


def pooled(options, params, encoded, num_patches):
  """What the head reads, and the probe's attention where there is one."""
  patches, weights = encoded[:, -num_patches:], None
  if options.pool == "map":
    probe = params["MAPHead_0"]
    layer = probe["MultiHeadDotProductAttention_0"]
    x = np.tile(probe["probe"], (len(encoded), 1, 1))
    x, weights = attended(x, patches, layer, options, None)
    y = normed(x, probe["LayerNorm_0"], options.ln_eps)
    return (x + mlp_of(y, probe["MlpBlock_0"], options))[:, 0], weights
  parts = {"token": encoded[:, 0], "gap": patches.mean(1)}
  parts["token_gap"] = np.concatenate(list(parts.values()), -1)
  x = parts[options.pool]
  if "pooled_norm" in params:
    x = normed(x, params["pooled_norm"], options.ln_eps)
  if "projection" in params:
    x = x @ params["projection"]["kernel"]
  return x, weights


def apply(options, params, images, tokens=None):
  """Returns all intermediates, the attention weights, and the attention map.

  Args:
    options: The model's options.
    params: Its parameters, not stacked.
    images: Floats.
    tokens: Takes the place of `stem`, for a hybrid.
  """
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  if tokens is None:
    tokens = stem(p, images, options.patch)
  tokens = np.asarray(tokens, float)
  out, weights = encode(options, p, tokens)
  num_patches = tokens.shape[1] * tokens.shape[2]
  x, of_probe = pooled(options, p, out["encoded"], num_patches)
  out |= {"stem": tokens, "pooled": x}
  if "pre_logits" in p:
    x = np.tanh(x @ p["pre_logits"]["kernel"] + p["pre_logits"]["bias"])
  logits = x @ p["head"]["kernel"] + p["head"]["bias"]
  if "head_dist" in p:
    second, head = out["encoded"][:, 1], p["head_dist"]
    x, of_class = (x + second) / 2, logits
    of_second = second @ head["kernel"] + head["bias"]
    out |= {"class_logits": of_class, "distillation_logits": of_second}
    logits = (of_class + of_second) / 2
  out |= {"pre_logits": x, "logits": logits}
  rows = rows_read(options, p, rollout(weights), of_probe, num_patches)
  rows = rows[:, -num_patches:].reshape(tokens.shape[:3])
  return out, weights, rows / rows.sum((1, 2), keepdims=True)


def rollout(weights):
  """The product of (A + I) / 2 of all layers, the last one leftmost."""
  rolled = np.eye(weights.shape[-1])
  for layer in weights:
    rolled = (layer.mean(1) + np.eye(layer.shape[-1])) / 2 @ rolled
  return rolled


def rows_read(options, params, rolled, of_probe, num_patches):
  """The row of the rollout of what the head reads: [b, n]."""
  patches = rolled[:, -num_patches:]
  if options.pool == "map":
    return np.einsum("bhqk,bkn->bn", of_probe, patches)
  of_token = rolled[:, : 1 + ("dist" in params)].mean(1)
  of_pool = {"token": of_token, "gap": patches.mean(1)}
  of_pool["token_gap"] = of_token + of_pool["gap"]
  return of_pool[options.pool]

"""Random weights and logits, for tests of other libraries' weights."""

import dataclasses
import functools

import flax
import jax
import numpy as np
from etils import epath

from vit_jax import models
from vit_jax.weights.weights_file import StateDict, lazy
from vit_jax.zoo.files import series


@functools.cache
def shapes(model, num_classes, image_size):
  """Returns the shapes of our model's parameters, by flat names.

  The parameters of all blocks have the same shapes: one block is traced.
  """
  depth = 0 if model.name.startswith("bit") else model.size.depth
  if depth and not model.scan:
    model = dataclasses.replace(model, depth=1)
  images = jax.ShapeDtypeStruct((1, *image_size, 3), np.float32)
  module = models.build(model, num_classes)
  tree = jax.eval_shape(module.init, jax.random.key(0), images)["params"]
  flat = flax.traverse_util.flatten_dict(tree, sep="/")
  return {
    name.replace("encoderblock_0/", f"encoderblock_{i}/"): x.shape
    for name, x in flat.items()
    for i in range(depth if "encoderblock_0/" in name else 1)
  }


def random_params(model, num_classes, image_size, seed=0):
  """Returns flat parameters of our model, in which every part matters."""
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in shapes(model, num_classes, image_size).items():
    x = rng.standard_normal(shape, np.float32)
    if name.endswith("scale"):
      x = 1 + 0.3 * x
    elif name.endswith("kernel"):
      axes = (0, 1) if name.endswith("out/kernel") else (0,)
      axes = (0, 1, 2) if x.ndim == 4 else axes
      x = x * np.prod([x.shape[i] for i in axes]) ** -0.5
    else:
      x = 0.3 * x
    params[name] = np.float32(x)
  return params


def randomise(module, seed=0):
  """Gives a torch module weights in which every part matters."""
  import torch

  rng = np.random.default_rng(seed)
  for name, leaf in module.named_parameters():
    x = rng.standard_normal(tuple(leaf.shape), np.float32)
    if name.endswith("weight") and x.ndim == 1 or "gamma" in name:
      x = 1 + 0.3 * x
    elif name.endswith("weight"):
      x = x * np.prod(x.shape[1:]) ** -0.5
    else:
      x = 0.3 * x
    leaf.data = torch.from_numpy(np.asarray(x, np.float32)).to(leaf.dtype)


def state(module):
  """Returns a torch module's arrays, lazily, as a file would."""
  return {k: lazy(v.detach().numpy()) for k, v in module.state_dict().items()}


def image(image_size, seed=1):
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (1, *image_size, 3)).astype(np.float32)


def translate(of, arrays, num_heads=None, config=None, **options):
  """Returns our parameters and options of arrays, and what a config states.

  Args:
    of: A series of `vit_jax.zoo.files`.
    arrays: Name -> array, lazy or not.
    num_heads: As the user states it.
    config: Contents of config.json.
    options: Further options from the user.
  """
  lazily = {k: v if hasattr(v, "then") else lazy(v) for k, v in arrays.items()}
  options = options | ({"num_heads": num_heads} if num_heads else {})
  file = StateDict(epath.Path("x"), lazily, {}, config or {}, options)
  return series.translate(of, file)[:3]


def our_logits(model, num_classes, params, images, key="logits"):
  """Applies our model, in the type that the model states."""
  with jax.enable_x64(model.dtype == "float64"):
    params = {k: np.asarray(v, model.dtype) for k, v in params.items()}
    got = {k: v.shape for k, v in params.items()}
    assert got == shapes(model, num_classes, images.shape[1:3])
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    module = models.build(model, num_classes)
    _, out = jax.jit(module.apply)(
      {"params": params}, np.asarray(images, model.dtype)
    )
    return np.asarray(out[key])


def torch_logits(module, images, dtype):
  import torch

  module = module.eval().to(getattr(torch, dtype))
  x = torch.from_numpy(images).permute(0, 3, 1, 2)
  with torch.no_grad():
    return module(x.to(getattr(torch, dtype)))


def error(got, expected):
  """Returns the largest difference, as a share of the largest value."""
  got, expected = np.asarray(got), np.asarray(expected)
  assert got.shape == expected.shape
  return np.abs(got - expected).max() / np.abs(expected).max()

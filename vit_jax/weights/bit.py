"""Names of BiT's own `.npz` files, as TensorFlow wrote them.

`resnet/block1/unit01/a/standardized_conv2d/kernel` is our
`block1/unit1/conv1/kernel`; b and c are conv2 and conv3. Some files number the
convolutions (`standardized_conv2d_7`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.weights.weights_file import LazyArray, shorten

_UNIT = r"resnet/block(\d)/unit0*(\d+)/"
_CONV = r"standardized_conv2d(?:_\d+)?/kernel"
NORMS = {"gamma": "scale", "beta": "bias"}
LETTERS = "abc"


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a BiT file."""
  return any(re.fullmatch(_UNIT + "a/" + _CONV, n) for n in names)


def read(
  arrays: Mapping[str, LazyArray],
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
  """Returns lazy arrays by our flat names, and options of the model.

  Raises:
    ValueError: Some names are not those of a BiT file; the message lists them.
      Or the head is not a 1 x 1 convolution.
  """
  params, unknown = {}, []
  for name, array in arrays.items():
    ours = rename(name)
    if ours is None:
      unknown.append(name)
    elif ours == "head/kernel":  # a convolution of 1 x 1
      shape = array.shape[-2:]
      if array.shape != (1, 1, *shape):
        raise ValueError(f"{name}: got {array.shape}, expected (1, 1, C, D).")
      params[ours] = array.then(shape, lambda a, s=shape: a.reshape(s))
    else:
      params[ours] = array
  if unknown:
    raise ValueError(f"got {shorten(sorted(unknown))}, not in a BiT file.")
  return params, {"root_pad": "zero"}


def write(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns arrays under the names of BiT's files; the reverse of `read`."""
  return {
    _published(k): np.reshape(v, (1, 1, *v.shape))
    if k == "head/kernel"
    else np.asarray(v)
    for k, v in params.items()
  }


def rename(name: str) -> str | None:
  """Returns our name for a published one; None if it is not one.

  Example:
    >>> rename("resnet/block1/unit02/c/group_norm/gamma")
    'block1/unit2/gn3/scale'
  """
  if re.fullmatch("resnet/root_block/" + _CONV, name):
    return "conv_root/kernel"
  if m := re.fullmatch(r"resnet/head/conv2d/(kernel|bias)", name):
    return f"head/{m[1]}"
  if m := re.fullmatch(r"resnet/group_norm/(gamma|beta)", name):
    return f"norm-pre-head/{NORMS[m[1]]}"
  if m := re.fullmatch(_UNIT + "a/proj/" + _CONV, name):
    return f"block{m[1]}/unit{m[2]}/conv_proj/kernel"
  if m := re.fullmatch(_UNIT + "([abc])/" + _CONV, name):
    return f"block{m[1]}/unit{m[2]}/conv{LETTERS.index(m[3]) + 1}/kernel"
  if m := re.fullmatch(_UNIT + "([abc])/group_norm/(gamma|beta)", name):
    number = LETTERS.index(m[3]) + 1
    return f"block{m[1]}/unit{m[2]}/gn{number}/{NORMS[m[4]]}"
  return None


def _published(ours: str) -> str:
  conv, norm = "standardized_conv2d/kernel", {"scale": "gamma", "bias": "beta"}
  first, *inner, leaf = ours.split("/")
  if first == "conv_root":
    return f"resnet/root_block/{conv}"
  if first == "head":
    return f"resnet/head/conv2d/{leaf}"
  if first == "norm-pre-head":
    return f"resnet/group_norm/{norm[leaf]}"
  unit = f"resnet/{first}/unit{int(inner[0].removeprefix('unit')):02d}"
  if inner[1] == "conv_proj":
    return f"{unit}/a/proj/{conv}"
  letter = LETTERS[int(inner[1][-1]) - 1]
  if inner[1].startswith("conv"):
    return f"{unit}/{letter}/{conv}"
  return f"{unit}/{letter}/group_norm/{norm[leaf]}"

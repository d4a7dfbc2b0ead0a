"""Names of Google's `.npz` files: ViT, its hybrids, AugReg, big_vision.

Three generations of names are mapped to ours: the ViT paper's (numbered over
all layers of a block: `LayerNorm_2`), linen's (numbered by kind:
`LayerNorm_1`), and big_vision's (also for ResNets): linen's, with the position
table at the top level and without a row for the class token. big_vision's files
may stack the blocks on a leading axis.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.families import ModelConfig
from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray, shorten

# Training states have the parameters under one of the first two, beside
# moments; a SigLIP has its image tower under `_IMAGES`, beside the text tower.
_IMAGES = "params/img/"
PREFIXES = ("opt/target/", "params/params/", _IMAGES, "params/")

# Some of our names of a ResNet's arrays.
RESNET_NAMES = {"conv_root/kernel", "block1/unit1/conv1/kernel"}

# Before the first array of a training state's average, or of a teacher; not
# within the state of an optimiser, whose averages are of gradients.
_AVERAGE = re.compile(
  r"((?:(?:train_)?state/|model/)?"
  r"(?:(?:params|model|state)_)?(?:ema|teacher)(?:_(?:params|model|state))?/)"
  r"(?:params/)?(?:img/)?(?=(?:embedding|(?:root_block/)?conv_root)/kernel$)"
)

# Regular expression of all names of an array; our name; the name in the ViT
# paper's files; the name in big_vision's. The first match counts, and a name
# without a match stays as it is.
_BLOCK = r"^(Transformer/encoderblock(?:_\d+)?)"
NAMES = (
  (
    _BLOCK + "/MultiHeadDotProductAttention_[01]/",
    r"\1/MultiHeadDotProductAttention_0/",
    r"\1/MultiHeadDotProductAttention_1/",
    r"\1/MultiHeadDotProductAttention_0/",
  ),
  (
    _BLOCK + "/LayerNorm_[12]/",
    r"\1/LayerNorm_1/",
    r"\1/LayerNorm_2/",
    r"\1/LayerNorm_1/",
  ),
  (
    _BLOCK + "/MlpBlock_[03]/",
    r"\1/MlpBlock_0/",
    r"\1/MlpBlock_3/",
    r"\1/MlpBlock_0/",
  ),
  (
    r"^(Transformer/)?(posembed_input/)?pos_embedding$",
    POS_EMBEDDING,
    POS_EMBEDDING,
    "pos_embedding",
  ),
  (
    r"^(?:root_block/)?conv_root/",
    "conv_root/",
    "conv_root/",
    "conv_root/",  # big_vision's bit.py; bit_paper.py: see bit.write
  ),
  (r"/unit0*(\d+)/", r"/unit\1/", r"/unit\1/", r"/unit\1/"),
)

_NORM_OF_RESNET = re.compile(r"(^|/)(gn\w*|norm-pre-head)/(scale|bias)$")


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a ViT, a hybrid, or a ResNet of big_vision."""
  ours = {rename(_strip(n)) for n in names}
  return "embedding/kernel" in ours or ours >= RESNET_NAMES


def averaged(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
  """Returns the arrays of the average in a training state, and a note.

  Without an average, they are all arrays, and there is no note.

  Args:
    arrays: Name, with "/" between keys -> anything.
  """
  found = next(filter(None, map(_AVERAGE.match, arrays)), None)
  if not found:
    return dict(arrays), []
  prefix, depth = found[0], found[1].count("/")
  inside = {n.removeprefix(prefix): n for n in arrays if n.startswith(prefix)}
  tops = ["/".join(n.split("/")[:depth]) for n in arrays]
  text = f"the arrays are those of {found[1][:-1]!r} in the file"
  if beside := [n for n in dict.fromkeys(tops) if n + "/" != found[1]]:
    text += f", and not of {shorten(beside)}"
  return {ours: arrays[n] for ours, n in inside.items()}, [f"{text}."]


def left_out(names: Iterable[str]) -> list[str]:
  """Returns the arrays of text towers, and of the comparison with images."""
  names = list(names)
  if not any(name.startswith(_IMAGES) for name in names):
    return []
  return [
    name
    for name in names
    if name.startswith("params/") and not name.startswith(_IMAGES)
  ]


def read(
  arrays: Mapping[str, LazyArray],
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
  """Returns the parameters by our flat names ("a/b/c"), and options.

  Moments and steps of a training state are left out, and so are the arrays of
  `left_out`. Stacked blocks are separated.

  Returns:
    Lazy arrays; options of the model that follow from the names: cls_row,
    root_pad.

  Raises:
    ValueError: Two arrays have the same name.
  """
  prefix = next(
    (p for p in PREFIXES if any(n.startswith(p) for n in arrays)), ""
  )
  params: dict[str, LazyArray] = {}
  for name, array in arrays.items():
    if not name.startswith(prefix):
      continue
    ours = rename(name.removeprefix(prefix))
    if _NORM_OF_RESNET.search(ours):  # some have [1, 1, 1, c]
      array = array.then((array.size,), np.ravel)
    for path, part in _unstacked(ours, array):
      if path in params:
        raise ValueError(f"got {name!r} and another array for {path!r}.")
      params[path] = part
  options = {}
  if prefix + "pos_embedding" in arrays and "cls" in params:
    options["cls_row"] = False
  if "norm-pre-head/scale" in params:
    options["root_pad"] = "nothing"
  return params, options


def has_empty_head(params: Mapping[str, LazyArray]) -> bool:
  """Whether these are a file of `gs://vit_models/imagenet21k`.

  Its authors set the classifier to zero, since it is not published
  (google-research/vision_transformer, issue 10). Other files of 21,843 classes
  have one.
  """
  head, bias = params.get("head/kernel"), params.get("head/bias")
  if head is None or bias is None or head.shape[-1] != 21_843:
    return False
  return not np.any(np.asarray(bias)) and not np.any(np.asarray(head))


def is_big_vision(model: ModelConfig, params: Mapping[str, Any]) -> bool:
  """Whether only big_vision has names for all parts of a model.

  Args:
    model: Model of the parameters.
    params: By our flat names.
  """
  return (
    model.name == "bit_v1"
    or getattr(model, "pool", None) == "map"
    or getattr(model, "posemb", None) == "sincos2d"
    or ("cls" in params and POS_EMBEDDING in params and not model.has_cls_row)
  )


def write(
  params: Mapping[str, np.ndarray], *, is_big_vision: bool = False
) -> dict[str, np.ndarray]:
  """Returns arrays under the names of the ViT paper's files.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    is_big_vision: Whether to use big_vision's names instead, which cover every
      part of a MAP head and have a position table without a class row.
  """
  if is_big_vision:
    return {"params/" + rename(k, 3): np.asarray(v) for k, v in params.items()}
  return {
    rename(k, 2): np.reshape(v, (1, 1, 1, -1))
    if _NORM_OF_RESNET.search(k)
    else np.asarray(v)
    for k, v in params.items()
  }


def rename(name: str, column: int = 1) -> str:
  """Returns the name in another column of `NAMES`, or the same name.

  Args:
    name: A published name; for columns 2 and 3, our name.
    column: 1 for our name, 2 for that of the ViT paper's files, 3 for
      big_vision's.

  Example:
    >>> rename("Transformer/encoderblock_3/LayerNorm_2/scale")
    'Transformer/encoderblock_3/LayerNorm_1/scale'
  """
  for row in NAMES:
    if re.search(row[0], name):
      return re.sub(row[0], row[column], name)
  return name


def _strip(name: str) -> str:
  return next(
    (name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name
  )


def _unstacked(name: str, array: LazyArray):
  """Yields names and arrays of single blocks; others unchanged."""
  prefix = "Transformer/encoderblock/"
  if not name.startswith(prefix):
    yield name, array
    return
  inner = name.removeprefix(prefix)
  if not array.shape:
    raise ValueError(f"{name}: got a scalar, expected one array a block.")
  unread, whole = set(range(array.shape[0])), None

  def read(i: int) -> np.ndarray:
    # The stacked array stays in memory until each of its blocks was read once.
    nonlocal whole
    blocks = np.asarray(array) if whole is None else whole
    unread.discard(i)
    whole = blocks if unread else None
    return blocks[i].copy()

  for i in range(array.shape[0]):
    part = LazyArray(array.shape[1:], array.dtype, lambda i=i: read(i))
    yield f"Transformer/encoderblock_{i}/{inner}", part

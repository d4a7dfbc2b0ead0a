"""Prefixes that training programs add to the names of a model's arrays."""

import re
from collections.abc import Iterable, Mapping

from vit_jax.weights.weights_file import LazyArray, shorten
from vit_jax.zoo.files import hf_names

# Words before the names of a model; where there are several models, the one
# whose word comes first is taken: averages are what their authors evaluate.
CONTAINERS = (
  "state_dict_ema",
  "model_ema",
  "ema",
  "teacher",
  "state_dict",
  "model",
  "module",
  "_orig_mod",
  "encoder",
  "backbone",
  "net",
  "network",
  "student",
)
_WRAPPERS = rf"(?:{'|'.join(CONTAINERS)}|_fsdp_wrapped_module)\."
_HF = r"embeddings\.patch_embeddings?(?:\.projection)?\.weight"
_TYPES = "|".join(p for t in hf_names.MODEL_TYPES.values() for p in t.prefixes)
# Regular expressions of an array that every model has, after its prefix.
_FIRST = (
  r"(|.+?\.)patch_embed\.proj\.weight",  # timm's ViT
  rf"((?:{_WRAPPERS})*)(?:\w+\.)?{_HF}",  # Hugging Face's
  rf"(.+?\.)(?:{_TYPES}){_HF}",  # the same in a model of another name
  r"(|.+?\.)(?<!backbone\.)stem\.conv\.weight",  # BiT
  r"(|(?:.+\.)?visual\.)class_embedding",  # the images' tower of CLIP
)
# Arrays beside a model that only pre-training has, or that read texts.
_BESIDE = re.compile(
  rf"({_WRAPPERS})*(text\.|text_model\.|logit_(scale|bias)$"
  r"|transformer\.resblocks\.|token_embedding\.|positional_embedding$"
  r"|text_projection$|ln_final\.|attn_mask$|(input_resolution|context_length"
  r"|vocab_size)$|dino_head\.|ibot_head\.|(dino|ibot_patch)_loss\."
  r"|head\.(mlp|last_layer)\.)"
)
# What torch.compile, FSDP and checkpoints of activations add to names, at any
# module. At the beginning of all names it is a prefix.
_AROUND = re.compile(
  r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_CHUNKED = re.compile(r"blocks\.(\d{1,3})\.(\d{1,3})\.")


def without(
  arrays: Mapping[str, LazyArray],
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
  """Returns the arrays of the model under its own names, and notes.

  A prefix such as `module.` or `teacher.backbone.` is removed, and so are parts
  such as `_orig_mod.` inside of names. DINOv2's blocks in chunks
  (`blocks.1.6.`, chunk and block) lose the chunk. Other names do not change. Of
  several models, the first one by `CONTAINERS` is used.

  Args:
    arrays: Name in the file -> array.

  Raises:
    ValueError: There are several models and none comes first; or there are
      other arrays that belong to no pre-training.
  """
  notes: list[str] = []
  plain = {_AROUND.sub("", name): name for name in arrays}
  if len(plain) == len(arrays) and plain.keys() != arrays.keys():
    parts = {part for name in arrays for part in _AROUND.findall(name)}
    notes.append(f"taken out of the names: {', '.join(sorted(parts))}.")
    arrays = {new: arrays[old] for new, old in plain.items()}
  prefixes = _prefixes(arrays)
  if prefixes and "" not in prefixes:
    prefix, *more = sorted(prefixes, key=rank_of)
    if more and rank_of(prefix) == rank_of(more[0]):
      raise ValueError(f"got several models: {shorten(sorted(prefixes))}.")
    beside = [n for n in arrays if not n.startswith(prefix)]
    roots = tuple(other.split(".")[0] + "." for other in more)
    if unknown := [
      n for n in beside if not (_BESIDE.match(n) or n.startswith(roots))
    ]:
      raise ValueError(f"got arrays beside {prefix!r}: {shorten(unknown)}.")
    arrays = {
      name.removeprefix(prefix): array
      for name, array in arrays.items()
      if name.startswith(prefix)
    }
    left_out = f", and left out {shorten(beside)}" if beside else ""
    notes.append(f"the prefix {prefix!r} was taken off the names{left_out}.")
  blocks = [name for name in arrays if name.startswith("blocks.")]
  if blocks and all(map(_CHUNKED.match, blocks)):
    renamed = {_CHUNKED.sub(r"blocks.\2.", n, count=1): n for n in blocks}
    if len(renamed) == len(blocks):
      rest = {n: a for n, a in arrays.items() if n not in set(blocks)}
      arrays = rest | {new: arrays[old] for new, old in renamed.items()}
      notes.append("blocks were in chunks, as DINOv2's training saves them.")
  return dict(arrays), tuple(notes)


def has_model(names: Iterable[str]) -> bool:
  """Whether the names contain a model of known form, with a prefix or not."""
  return bool(_prefixes(_AROUND.sub("", name) for name in names))


def rank(names: Iterable[str]) -> tuple[int, ...]:
  """Returns the order in which models under several names are taken."""
  known = {name: i for i, name in enumerate(CONTAINERS)}
  return tuple(known.get(name, len(known)) for name in names)


def rank_of(prefix: str) -> tuple[int, ...]:
  """Returns the rank of a prefix such as "teacher.backbone."."""
  return rank(prefix.split(".")[:-1])


def _prefixes(names: Iterable[str]) -> set[str]:
  """Returns the prefix of each model's names; "" for none."""
  names = list(names)
  for end in _FIRST:
    matches = [re.fullmatch(end, name) for name in names]
    if prefixes := {m[1] for m in matches if m}:
      return prefixes
  return set()

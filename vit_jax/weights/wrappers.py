"""Names that training programs put around those of a model."""

import re
from collections.abc import Mapping

from vit_jax.weights.torch_layout import shorten
from vit_jax.weights.weights_file import LazyArray

# Prefix and end of the names of a model's first convolution: timm's ViT,
# Hugging Face's, whose other families have prefixes of their own, and BiT.
_WRAPPERS = (
  r"(?:module|model|encoder|backbone|teacher|student|net|network|_orig_mod)\."
)
_FIRST = (
  r"(|.+?\.)patch_embed\.proj\.weight",
  rf"((?:{_WRAPPERS})*)(?:vit\.)?embeddings\.patch_embeddings\.projection"
  r"\.weight",
  r"(|.+?\.)(?<!backbone\.)stem\.conv\.weight",
)
# Arrays beside a model that only pre-training has, or that read texts.
_BESIDE = re.compile(
  r"text\.|text_model\.|logit_(scale|bias)$"
  r"|((teacher|student)\.)?(dino_head|ibot_head|dino_loss|ibot_patch_loss)\."
)
_CHUNKED = re.compile(r"blocks\.(\d{1,3})\.(\d{1,3})\.")


def unwrapped(
  arrays: Mapping[str, LazyArray],
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
  """Returns the arrays of the model under its own names, and notes.

  A prefix such as `module.` or `teacher.backbone.` is taken off, and DINOv2's
  blocks in chunks (`blocks.1.6.`, chunk and block) lose the chunk. Other names
  are not changed.

  Args:
    arrays: Name in the file -> array.

  Raises:
    ValueError: There are several models, or arrays beside the model.
  """
  notes: list[str] = []
  prefixes = _prefixes(arrays)
  if prefixes and "" not in prefixes:
    if len(prefixes) > 1:
      names = " and ".join(map(repr, sorted(prefixes)))
      raise ValueError(
        f"got several models, under the prefixes {names}, expected one."
        f" Save it alone: {_line(max(prefixes))}"
      )
    (prefix,) = prefixes
    beside = [n for n in arrays if not n.startswith(prefix)]
    if unknown := [n for n in beside if not _BESIDE.match(n)]:
      raise ValueError(
        f"got {len(unknown)} arrays beside the model, whose prefix is"
        f" {prefix!r}: {shorten(unknown)}; expected the model alone:"
        f" {_line(prefix)}"
      )
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
      others = {n: a for n, a in arrays.items() if n not in set(blocks)}
      arrays = others | {new: arrays[old] for new, old in renamed.items()}
      notes.append("blocks were in chunks, as DINOv2's training saves them.")
  return dict(arrays), tuple(notes)


def _prefixes(names: Mapping[str, LazyArray]) -> set[str]:
  """Returns what is before the names of each model; "": nothing."""
  for end in _FIRST:
    found = [re.fullmatch(end, name) for name in names]
    if prefixes := {m[1] for m in found if m}:
      return prefixes
  return set()


def _line(prefix: str) -> str:
  """Returns Python that saves the arrays under a prefix without it."""
  return (
    f"p = {prefix!r}; safetensors.torch.save_file({{k.removeprefix(p): v for k,"
    " v in safetensors.torch.load_file(SRC).items() if k.startswith(p)}, DST)"
  )

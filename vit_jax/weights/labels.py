"""Class names of a head, where its width decides them, and WordNet's words.

ImageNet-21k has been published with heads of three widths, in three orders. The
statements here were checked against the lists of timm 1.0.31
(timm/data/_info/*_synsets.txt; Google's own list, for BiT, is linked in
google-research/big_transfer#7):

- 21,841: the data set itself, the release of fall 2011. Sorted wnids.
- 21,843: the same with n03931044 and n09859684, which a comment in
  google-research/big_transfer#18 names, too; one of its authors believes there,
  without being sure, that they have no images. Sorted wnids. timm uses this
  list for every head of that width, those of ViT's files included.
- 21,842: FocalNet's (microsoft/FocalNet#27). ImageNet-1k's 1,000 come first,
  and the others follow, sorted. Place 850, n04399382, is in ImageNet-1k and in
  neither of the two lists above: no image in training had that label.

wordnet.csv has the wnids of all of them, sorted, which of them ImageNet-1k has,
and the first word of each in WordNet 3.0 (Princeton University, whose licence
permits its use), as in timm/data/_info/imagenet_synset_to_lemma.txt.
"""

import csv
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

_FILE = pathlib.Path(__file__).parent / "wordnet.csv"
# What lists of ImageNet-21k lack; see above.
_NOT_IN_21K = {
  21_841: {"n03931044", "n04399382", "n09859684"},
  21_843: {"n04399382"},
}

_DESCRIPTIONS = {
  1000: (
    "1,000 classes: by convention ImageNet-1k in the order of sorted wnids,"
    " n01440764 to n15075141."
  ),
  21_841: (
    "21,841 classes: by convention ImageNet of fall 2011 in the order of sorted"
    " wnids, which differs from 9205 on from Google's order of 21,843, and"
    " everywhere from FocalNet's of 21,842."
  ),
  21_842: (
    "21,842 classes: FocalNet's order, ImageNet-1k in its usual order (of which"
    " 850, n04399382, had no images) and then the other wnids sorted; its"
    " indices are not those of 21,843 or 21,841."
  ),
  21_843: (
    "21,843 classes: Google's ImageNet-21k in the order of sorted wnids, that"
    " of the imagenet21k and AugReg files; without 9205 (n03931044) and 15027"
    " (n09859684) it is the order of 21,841, and FocalNet's of 21,842 is"
    " another one."
  ),
}


class _Class(NamedTuple):
  """A class of ImageNet: whether ImageNet-1k has it, and its word."""

  is_1k: bool
  word: str


@functools.cache
def _classes() -> dict[str, _Class]:
  """Returns the classes by wnid, sorted."""
  with _FILE.open(encoding="utf-8", newline="") as file:
    _, *rows = csv.reader(file)
  return {wnid: _Class(is_1k == "1", word) for wnid, is_1k, word in rows}


@functools.cache
def imagenet1k() -> tuple[str, ...]:
  """Returns the wnids of ImageNet-1k in the order of published heads.

  Example:
    >>> imagenet1k()[0]
    'n01440764'
  """
  return tuple(wnid for wnid, row in _classes().items() if row.is_1k)


def in_words(name: str) -> str:
  """Returns a wnid behind its word, and any other name as it is.

  Example:
    >>> in_words("n01440764"), in_words("cat")
    ('tench (n01440764)', 'cat')
  """
  found = _classes().get(name)
  return f"{found.word} ({name})" if found else name


def describe(num_classes: int) -> str | None:
  """Returns a sentence on the classes of a head of a known width, or None.

  A width is a convention and no proof: class names in a checkpoint have
  precedence over this sentence.

  Args:
    num_classes: Width of the head; 1000, 21841, 21842 and 21843 are known.
  """
  return _DESCRIPTIONS.get(num_classes)


def loss(num_classes: int, is_vit: bool) -> str | None:
  """Returns the loss that a published head of this width had, or None.

  The heads of 21,843 classes are those of Google's ViT and AugReg files, which
  were trained with a sigmoid for each class; nothing is known for BiT's.

  Source: google-research/vision_transformer#34; big_vision's vit_i21k.py.
  """
  return "sigmoid" if is_vit and num_classes == 21_843 else None


def known(num_classes: int) -> tuple[str, ...] | None:
  """Returns the wnids of the classes where the width alone decides, or None.

  Args:
    num_classes: Width of the head; 1000, 21841 and 21843 are known.
  """
  if num_classes == 1000:
    return imagenet1k()
  if num_classes not in _NOT_IN_21K:
    return None
  lacking = _NOT_IN_21K[num_classes]
  return tuple(wnid for wnid in _classes() if wnid not in lacking)


def wnids_of(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the wnids of a head that names ImageNet-1k's classes in words.

  Args:
    names: Names in the order of the head; those of ImageNet-1k begin with the
      tench and the goldfish, as in Hugging Face's config.json.

  Returns:
    Nothing for other names.
  """
  firsts = [name.split(",")[0] for name in names[:2]]
  if len(names) != 1000 or firsts != ["tench", "goldfish"]:
    return ()
  return imagenet1k()

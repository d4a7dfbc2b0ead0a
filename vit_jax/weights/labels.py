"""Class names of a head, where its width decides them.

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
"""

import importlib.util
import pathlib
from collections.abc import Sequence

_LABELS = "datasets/imagenet2012/labels.txt"  # in tensorflow_datasets

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


def imagenet1k() -> tuple[str, ...] | None:
  """Returns the wnids of ImageNet-1k in the order of published heads.

  They are read from the file of labels in TFDS's package, which is found
  without importing TFDS. None where TFDS or that file is not installed.

  Example:
    >>> imagenet1k()[0]
    'n01440764'
  """
  spec = importlib.util.find_spec("tensorflow_datasets")
  for folder in (spec and spec.submodule_search_locations) or ():
    file = pathlib.Path(folder) / _LABELS
    if file.exists():
      return tuple(file.read_text().split())
  return None


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
  """Returns the names of the classes where the width alone decides, or None.

  Args:
    num_classes: Width of the head. Only 1000 has names, those of `imagenet1k`.
  """
  return imagenet1k() if num_classes == 1000 else None


def wnids_of(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the wnids of a head that names ImageNet-1k's classes in words.

  Args:
    names: Names in the order of the head; those of ImageNet-1k begin with the
      tench and the goldfish, as in Hugging Face's config.json.

  Returns:
    Nothing for other names, and where `imagenet1k` finds none.
  """
  firsts = [name.split(",")[0] for name in names[:2]]
  if len(names) != 1000 or firsts != ["tench", "goldfish"]:
    return ()
  return imagenet1k() or ()

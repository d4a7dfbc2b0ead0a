"""Sizes of the Transformers by name; "B/16" is size B with 16-pixel patches.

Source: Table 1 of arXiv:2010.11929 (B, L, H), Table 1 of arXiv:2106.10270
(Ti, S), Table 2 of arXiv:2106.04560 (g, G).
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Size:
  """Width of the tokens, number of blocks, hidden width of the MLP, heads."""

  width: int
  depth: int
  mlp_dim: int
  num_heads: int


SIZES = {
  "Ti": Size(192, 12, 768, 3),
  "S": Size(384, 12, 1536, 6),
  "B": Size(768, 12, 3072, 12),
  "L": Size(1024, 24, 4096, 16),
  "H": Size(1280, 32, 5120, 16),
  "g": Size(1408, 40, 6144, 16),
  "G": Size(1664, 48, 8192, 16),
}


def nearest(word: str, known: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the known word next to `word`, or ""."""
  known = sorted(known)
  close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
  if not close:
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    close = [lowered[c] for c in close]
  return f" Did you mean {close[0]!r}?" if close else ""


def parse_variant(variant: str) -> tuple[Size, int]:
  """Splits "B/16" into the size B and the patch's side in pixels.

  Args:
    variant: "<size>/<patch>", a size of `SIZES` and a positive integer.

  Raises:
    ValueError: The text has another form, or the size is unknown.

  Example:
    >>> parse_variant("B/16")
    (Size(width=768, depth=12, mlp_dim=3072, num_heads=12), 16)
  """
  match = re.fullmatch(r"([A-Za-z]+)/([1-9][0-9]*)", variant)
  if not match:
    raise ValueError(
      f"got {variant!r}, expected '<size>/<patch in pixels>' such as 'B/16',"
      f" with a size of {', '.join(SIZES)}."
    )
  name, patch = match.groups()
  if name not in SIZES:
    raise ValueError(
      f"got size {name!r}, expected one of {', '.join(SIZES)}."
      + nearest(name, SIZES)
    )
  return SIZES[name], int(patch)

"""Parses the text of a compiled module: computations, instructions, arrays."""

import dataclasses
import functools
import math
import re

BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in an instruction's type.

  Attributes:
    dims: Logical dimensions.
    logical_bytes: Bytes without padding.
    bytes: Bytes in memory, padded to tiles.
    is_in_hbm: Whether it is in the chip's main memory.
  """

  dims: tuple[int, ...]
  logical_bytes: int
  bytes: int
  is_in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def called(self, key: str) -> str:
    """Returns the computation that an attribute names."""
    return re.search(key + r"=%?([\w.\-]+)", self.attributes)[1]

  @property
  def kind(self) -> str:
    """The opcode; for asynchronous ones without -start and -done."""
    return re.sub(r"-(start|done)$", "", self.opcode)

  @property
  def hbm_bytes(self) -> int:
    return sum(a.bytes for a in self.arrays if a.is_in_hbm)


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """Returns instructions by computation and name; and the entry's name."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if line.endswith("{") and (m := _HEAD.match(line)):
      current = computations.setdefault(m[2], {})
      entry = m[2] if m[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (m := _LINE.match(line)):
      current[m[2]] = _instruction(m[2], m[3], is_root=bool(m[1]))
  return computations, entry


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
  """Parses "TYPE opcode(operands), attributes"."""
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
  kind, rest = rest[:end], rest[end:].lstrip()
  start = rest.find("(")
  close = _closing(rest, start)
  opcode, inside = rest[:start], rest[start + 1 : close]
  attributes = rest[close + 1 :]
  if opcode in ("parameter", "constant"):
    attributes = inside + attributes
  return Instruction(
    name,
    opcode,
    tuple(_array(*m) for m in _ARRAY.findall(kind)),
    tuple(re.findall(r"%([\w.\-]+)", inside)),
    attributes,
    is_root,
  )


def _closing(text: str, start: int) -> int:
  """Returns the place of the parenthesis that closes the one at `start`."""
  depth = 0
  for m in re.finditer(r"[()]", text[start:]):
    depth += 1 if m[0] == "(" else -1
    if depth == 0:
      return start + m.start()
  raise ValueError(f"got {text[:80]!r}, expected balanced parentheses.")


def _array(kind: str, dims: str, layout: str) -> Array:
  sizes = tuple(int(d) for d in dims.split(",") if d)
  bits = BITS.get(kind) or int((re.search(r"\d+$", kind) or ["32"])[0])
  padded = list(sizes)
  space = re.search(r"S\((\d+)\)", layout)
  tiled = re.match(r"([\d,]+):T\(([\d,]+)\)", layout)
  if tiled and sizes:
    order = [int(d) for d in tiled[1].split(",")]  # the innermost first
    tile = [int(t) for t in tiled[2].split(",")][::-1]
    for axis, side in zip(order, tile, strict=False):
      padded[axis] = -(-sizes[axis] // side) * side
  return Array(
    sizes,
    bits * math.prod(sizes) // 8,
    bits * math.prod(padded) // 8,
    space is None or space[1] == "0",
  )


def product_flops(x: Instruction, left: Instruction, right: Instruction) -> int:
  """Returns 2 FLOPs for each multiply-add of a product or a convolution.

  Multiply-adds with the padding of a convolution, or with the gaps of a dilated
  input, do not count.
  """
  out, l, r = x.arrays[0].dims, left.arrays[0].dims, right.arrays[0].dims
  if x.opcode == "dot":
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
    inner = math.prod(l[int(a)] for a in axes[1].split(",") if a)
    return 2 * math.prod(out) * inner
  labels = re.search(
    r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", x.attributes
  ).groups()
  window = re.search(r"window=\{([^}]*)\}", x.attributes)
  window = dict(p.split("=") for p in window[1].split()) if window else {}
  axes = sorted(c for c in labels[2] if c.isdigit())

  def option(key: str, default) -> list:
    values = window.get(key)
    return values.split("x") if values else [default] * len(axes)

  pairs = 1
  for i, axis in enumerate(axes):
    pairs *= _pairs(
      l[labels[0].index(axis)],
      out[labels[2].index(axis)],
      int(option("size", 1)[i]),
      int(option("stride", 1)[i]),
      int(option("pad", "0_0")[i].split("_")[0]),
      int(option("lhs_dilate", 1)[i]),
      int(option("rhs_dilate", 1)[i]),
    )
  groups = re.search(r"batch_group_count=(\d+)", x.attributes)
  features = re.search(r"feature_group_count=(\d+)", x.attributes)
  return (
    2
    * pairs
    * (l[labels[0].index("b")] // int(groups[1] if groups else 1))
    * (l[labels[0].index("f")] // int(features[1] if features else 1))
    * r[labels[1].index("o")]
  )


@functools.cache
def _pairs(
  size_in: int,
  size_out: int,
  window: int,
  stride: int,
  pad: int,
  dilate_in: int,
  dilate_window: int,
) -> int:
  """Returns how many pairs of an output and a window's place have an input."""
  total = 0
  for k in range(window):
    first = k * dilate_window - pad  # the place of output 0's window
    for o in range(size_out):
      at = first + o * stride
      if at >= 0 and at % dilate_in == 0 and at // dilate_in < size_in:
        total += 1
  return total

"""Reads a program compiled for a TPU: work, traffic, collectives and time.

XLA's own cost analysis counts the body of a loop only once, and does not cover
collectives. This module counts every instruction as often as it runs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from vit_jax.devices import Chip

COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "collective-permute",
  "all-to-all",
  "ragged-all-to-all",
  "collective-broadcast",
)
# Custom call in the fusion that starts an asynchronous collective.
START = "AsyncCollectiveStart"
# Kind of a transfer from the hosts of a slice to the hosts of other slices.
BETWEEN_SLICES = "between-slices"
# Estimated cycles of an instruction whose cycles XLA does not know.
UNKNOWN_CYCLES = 2**63 - 1
# Opcodes that move no bytes, or only name the result of another instruction.
FREE = (
  "parameter constant tuple get-tuple-element bitcast after-all partition-id"
  " replica-id"
).split()
# Custom calls whose time XLA does not know.
UNKNOWN_CALLS = r'custom_call_target="(ConcatBitcast|ZeroCrop|SliceId)"'
BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in an instruction's type.

  Attributes:
    dims: Logical dimensions.
    logical_bytes: Bytes without padding.
    bytes: Bytes in memory, padded to tiles.
    is_in_hbm: Whether the array is in the main memory of the chip.
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
    """Returns the name of the computation in an attribute."""
    return re.search(key + r"=%?([\w.\-]+)", self.attributes)[1]

  @property
  def kind(self) -> str:
    """The opcode, without the -start or -done of asynchronous instructions."""
    return re.sub(r"-(start|done)$", "", self.opcode)

  @property
  def hbm_bytes(self) -> int:
    return sum(a.bytes for a in self.arrays if a.is_in_hbm)


def estimate(text: str, costs: dict[str, float], chip: Chip) -> dict[str, Any]:
  """Returns the work and the estimated time of a compiled program, per chip.

  Args:
    text: Text of the module, `compiled.as_text()`.
    costs: XLA's own costs, `compiled.cost_analysis()`.
    chip: The chip for which the program was compiled.

  Returns:
    flops, bytes_accessed, cycles_seconds, link_seconds, between_slices_seconds,
    optimal_seconds, price_seconds and collectives; see
    `vit_jax.tools.planning.planner.plan`.
  """
  looped, once = Module(text).totals(chip)
  # XLA subtracts a second for each of these calls.
  unknown = len(re.findall(UNKNOWN_CALLS, text))
  optimal = costs["optimal_seconds"] + unknown
  optimal *= looped.roof_seconds / once.roof_seconds
  # XLA's estimate of a loop can be less than its arithmetic at the peak rate.
  optimal = max(optimal, looped.roof_seconds)
  links = looped.link_seconds(chip)
  cycles = looped.cycles / chip.clock + links
  return {
    "flops": costs["flops"] + looped.flops - once.flops,
    "bytes_accessed": costs["bytes accessed"] * looped.bytes / once.bytes,
    "cycles_seconds": cycles,
    "link_seconds": links,
    "between_slices_seconds": looped.between_slices_seconds(chip),
    "optimal_seconds": optimal,
    "price_seconds": math.sqrt(cycles * optimal),
    "collectives": looped.collectives,
  }


@dataclasses.dataclass
class Totals:
  """Sums over a module, for one execution on one chip.

  Attributes:
    cycles: Sum of the compiler's estimates. For an instruction without an
      estimate, the cycles of arithmetic or of traffic, whichever is more.
      Collectives and custom kernels add none.
    flops: FLOPs of products and convolutions.
    bytes: Bytes to and from the main memory.
    roof_seconds: Sum over the instructions of the time of arithmetic or of
      traffic at full rate, whichever is longer.
    collectives: Kind -> [number of executions, bytes].
  """

  cycles: float = 0.0
  flops: float = 0.0
  bytes: float = 0.0
  roof_seconds: float = 0.0
  collectives: dict[str, list[float]] = dataclasses.field(default_factory=dict)

  def link_seconds(self, chip: Chip) -> float:
    """Returns the time of the collectives at full rate, without overlap.

    An all-reduce sends its bytes twice, within and between slices.
    """
    seconds = self.between_slices_seconds(chip)
    for kind, (_, size) in self.collectives.items():
      if kind != BETWEEN_SLICES:
        passes = 1 + kind.startswith("all-reduce")
        seconds += passes * size / chip.ici_bandwidth
    return seconds

  def between_slices_seconds(self, chip: Chip) -> float:
    """Returns the part of `link_seconds` between slices."""
    if BETWEEN_SLICES not in self.collectives:
      return 0.0
    return 2 * self.collectives[BETWEEN_SLICES][1] / chip.dcn_bandwidth


class Module:
  """A compiled module, read from its text (`compiled.as_text()`)."""

  def __init__(self, text: str):
    self._computations, self._entry = parse(text)
    # Chains of asynchronous collectives that a computation starts.
    self._started = {
      _chain(x)
      for names in self._computations.values()
      if _is_start(names)
      for x in names.values()
      if x.kind in COLLECTIVES and _chain(x)
    }
    # (computation, channel) -> the fusion at which a collective counts.
    self._first_of_channel: dict[tuple[int, str], str] = {}
    self._reads = functools.cache(self._parameter_reads)
    self._writes = functools.cache(self._root_writes)
    self._flops = functools.cache(self._computation_flops)

  def totals(self, chip: Chip) -> tuple[Totals, Totals]:
    """Returns the sums with all trips of each loop, and with one trip."""
    looped, once = Totals(), Totals()
    for x, names, trips in self._visit(self._entry, 1):
      self._add(x, names, trips, looped, chip)
      self._add(x, names, 1, once, chip)
    return looped, once

  def _visit(self, name: str, trips: int) -> Iterator[tuple]:
    """Yields (instruction, its computation, number of executions)."""
    names = self._computations[name]
    for x in names.values():
      if x.opcode == "while":
        yield from self._visit(x.called("body"), trips * self._trips(x))
      elif x.opcode == "conditional":
        for branch in re.findall(r"%([\w.\-]+)", x.attributes.split("}")[0]):
          if branch in self._computations:
            yield from self._visit(branch, trips)
      elif x.opcode in ("call", "call-start"):  # the latter on a SparseCore
        yield from self._visit(x.called("to_apply"), trips)
      elif x.opcode == "async-start":
        yield from self._visit(x.called("calls"), trips)
      else:
        yield x, names, trips

  def _trips(self, loop: Instruction) -> int:
    """Returns the trips of a loop: the bound of the counter / its step."""
    if m := re.search(r"known_trip_count\D*(\d+)", loop.attributes):
      return int(m[1])
    condition = self._computations[loop.called("condition")]
    bounds = _constants(condition)
    for x in condition.values():
      if x.opcode == "fusion":
        bounds += _constants(self._computations[x.called("calls")])
    bounds = [b for b in bounds if b > 0]
    return -(-max(bounds) // self._step(loop, condition)) if bounds else 1

  def _step(self, loop: Instruction, condition: dict[str, Instruction]) -> int:
    """Returns the increment of the counter; 1 if it cannot be read."""
    counters = [
      int(re.search(r"index=(\d+)", x.attributes)[1])
      for x in condition.values()
      if x.opcode == "get-tuple-element"
    ]
    body = self._computations[loop.called("body")]
    root = next(x for x in body.values() if x.is_root)
    if not counters or counters[0] >= len(root.operands):
      return 1
    x = _copied(body, root.operands[counters[0]])
    if x is None:
      return 1
    if x.opcode == "fusion":
      steps = _constants(self._computations[x.called("calls")])
    else:
      inputs = [_copied(body, o) for o in x.operands]
      steps = _constants({y.name: y for y in inputs if y})
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1

  def _add(self, x, names, trips: int, total: Totals, chip: Chip) -> None:
    if x.opcode.endswith(("-done", "-update")) or x.opcode in FREE:
      return
    for kind, size in self._collectives_of(x, names):
      entry = total.collectives.setdefault(kind, [0, 0])
      entry[0] += trips
      entry[1] += trips * size
    if x.kind in (*COLLECTIVES, "send", "recv") or x.opcode.endswith("-start"):
      return
    flops = self._flops_of(x, names)
    size = self._bytes_of(x, names)
    seconds = max(flops / chip.peak_flops, size / chip.hbm_bandwidth)
    if m := re.search(r'"estimated_cycles":"(\d+)"', x.attributes):
      cycles = int(m[1])
      if cycles == UNKNOWN_CYCLES:
        cycles = round(seconds * chip.clock)
      total.cycles += trips * cycles
    total.flops += trips * flops
    total.bytes += trips * size
    total.roof_seconds += trips * seconds

  def _collectives_of(self, x, names) -> Iterator[tuple[str, int]]:
    """Yields kind and bytes of a collective: of input or output, the larger."""
    if x.opcode == "send" and "megascale" in x.attributes:
      yield BETWEEN_SLICES, _size(x.arrays[:1])
    elif x.kind in COLLECTIVES:
      ins = [a for o in x.operands if o in names for a in names[o].arrays]
      outs = x.arrays
      # The type of a start has the operands before the results.
      if x.opcode == "all-gather-start":
        outs = outs[len(ins) : 2 * len(ins)] or outs
      elif x.opcode == "all-reduce-start":
        outs = outs[: len(ins)] or outs
      elif x.opcode == "collective-permute-start":
        outs = outs[1:2] or outs
      yield x.kind, max(_size(ins), _size(outs))
    elif x.opcode == "fusion":
      # An asynchronous collective is spread over fusions, also in bodies of
      # loops. It counts where its chain starts or, without a chain, at the
      # first fusion of a computation with its channel.
      inner = self._computations[x.called("calls")]
      starts = _is_start(inner)
      for y in inner.values():
        if y.kind in COLLECTIVES and not y.opcode.endswith("-done"):
          if _chain(y) in self._started:
            is_first = starts
          else:
            channel = re.search(r"channel_id=(\d+)", y.attributes)
            key = (id(names), channel[1] if channel else y.name)
            first = self._first_of_channel.setdefault(key, x.name)
            is_first = first == x.name
          if is_first:
            ins = [a for o in y.operands if o in inner for a in inner[o].arrays]
            yield f"{y.kind}(fused)", max(_size(ins), _size(y.arrays))

  def _flops_of(self, x, names) -> int:
    if x.opcode in ("convolution", "dot"):
      return product_flops(x, *(names[o] for o in x.operands[:2]))
    return self._flops(x.called("calls")) if x.opcode == "fusion" else 0

  def _computation_flops(self, name: str) -> int:
    names = self._computations[name]
    return sum(self._flops_of(x, names) for x in names.values())

  def _bytes_of(self, x, names) -> int:
    operands = [names[o] for o in x.operands if o in names]
    if x.opcode == "fusion":
      called = x.called("calls")
      reads, writes = self._reads(called), self._writes(called)
      size = sum(
        min(reads.get(i, _padded(y.arrays)), _padded(y.arrays))
        for i, y in enumerate(operands)
        if all(a.is_in_hbm for a in y.arrays)
      )
      for i, a in enumerate(x.arrays):
        if a.is_in_hbm:
          part = writes[i] if i < len(writes) else None
          size += a.bytes if part is None else part
      return size
    if x.opcode in ("slice", "dynamic-slice"):
      return x.hbm_bytes + _padded(x.arrays)
    if x.opcode == "dynamic-update-slice":
      return 2 * _padded(operands[1].arrays)
    return x.hbm_bytes + sum(y.hbm_bytes for y in operands)

  def _parameter_reads(self, name: str) -> dict[int, int]:
    """Returns the bytes that a fused computation reads from each parameter.

    If it reads only slices of a parameter, only their bytes count.
    """
    names = self._computations[name]
    users: dict[str, list[Instruction]] = {}
    for x in names.values():
      for operand in set(x.operands):
        users.setdefault(operand, []).append(x)

    def used(wanted: str, full: int, depth: int) -> int:
      size = 0
      for y in users.get(wanted, []):
        if y.opcode in ("dynamic-slice", "slice", "gather") and (
          y.operands[0] == wanted
        ):
          size += _padded(y.arrays)
        elif y.opcode == "dynamic-update-slice" and y.operands[0] == wanted:
          pass
        elif y.opcode in ("bitcast", "get-tuple-element") and depth < 4:
          size += used(y.name, full, depth + 1)
        elif y.opcode == "fusion" and depth < 6:
          reads = self._reads(y.called("calls"))
          size += sum(
            reads.get(i, full) for i, o in enumerate(y.operands) if o == wanted
          )
        else:
          return full
      return min(size, full)

    return {
      int(re.match(r"\d+", x.attributes)[0]): used(x.name, _padded(x.arrays), 0)
      for x in names.values()
      if x.opcode == "parameter"
    }

  def _root_writes(self, name: str) -> tuple[int | None, ...]:
    """Returns the bytes that a fusion writes to each result; None: all."""
    names = self._computations[name]
    root = next(x for x in names.values() if x.is_root)

    def written(x: Instruction | None, depth: int) -> int | None:
      if x is None:
        return None
      if x.opcode == "dynamic-update-slice":
        update = names.get(x.operands[1])
        return _padded(update.arrays) if update else None
      if x.opcode == "bitcast" and depth < 4:
        return written(names.get(x.operands[0]), depth + 1)
      if x.opcode == "fusion":
        inner = self._writes(x.called("calls"))
        return inner[0] if len(inner) == 1 else None
      return None

    if root.opcode == "tuple":
      return tuple(written(names.get(o), 0) for o in root.operands)
    return (written(root, 0),)


def _is_start(names: dict[str, Instruction]) -> bool:
  return any(START in x.attributes for x in names.values())


def _chain(x: Instruction) -> str:
  """Returns the chain number of an asynchronous collective; "": none."""
  match = re.search(r'chain_id="(\d+)"', x.attributes)
  return match[1] if match else ""


def _size(arrays) -> int:
  return sum(a.logical_bytes for a in arrays)


def _padded(arrays) -> int:
  return sum(a.bytes for a in arrays)


def _constants(names: dict[str, Instruction]) -> list[int]:
  matches = (
    re.match(r"-?\d+(?=$|[,)\s])", x.attributes)
    for x in names.values()
    if x.opcode == "constant"
  )
  return [int(m[0]) for m in matches if m]


def _copied(names, name: str) -> Instruction | None:
  x = names.get(name)
  while x and x.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
    x = names.get(x.operands[0])
  return x


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """Returns {computation: {name: instruction}}, and the name of the entry."""
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
  """Returns the index of the parenthesis that closes the one at `start`."""
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
  """Returns the FLOPs of a product or a convolution, 2 per multiply-add.

  Multiply-adds with the padding of a convolution, or with the gaps of a dilated
  input, are not counted.
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
  """Returns the number of pairs (output, window position) with an input."""
  total = 0
  for k in range(window):
    first = k * dilate_window - pad
    for o in range(size_out):
      at = first + o * stride
      if at >= 0 and at % dilate_in == 0 and at // dilate_in < size_in:
        total += 1
  return total

"""Finds losses that use other rows: their value would depend on the mesh.

The step computes sums over the rows of each device and each microbatch, and
adds them up. So a loss may sum over rows what each row gives by itself. A loss
that compares rows, standardises over them or divides one sum by another has
another value for every number of devices and microbatches.

The loss is traced with a prime number of rows: a dimension that it divides is
one of rows. A result without such a dimension is the same for all rows, or a
sum over them, which only linear operations may use.

The order of rows is not followed: a loss that takes rows by indices or mixes
them by a reshape passes, and so does one that draws random numbers by position.
"""

import enum
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# No size of a model is a multiple of these primes, or another one is used.
PRIMES = (7919, 6133, 4093)

EXPECTED = (
  "but the step adds up the sums of all devices and microbatches, so that the"
  " result would depend on their number; expected sums over the rows of what"
  " each row gives by itself. What needs the whole batch belongs into"
  " `targets`, or into a loss with whole_batch=True."
)


class Kind(enum.Enum):
  """What is known of a result, unless a string says how it uses other rows."""

  PLAIN = "of each row by itself, or the same for all rows"
  ZERO = "zeros"
  SUM = "linear in sums over rows"


PLAIN, ZERO, SUM = Kind

# Primitives that are linear in all their operands together.
ALL = (
  *("add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type"),
  *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "pad"),
  *("concatenate", "split", "stack", "unstack"),
  *("copy", "copy_p", "name", "stop_gradient"),
)
# The same, and those that are linear in some operands together: which ones.
LINEAR = dict.fromkeys(ALL, slice(None)) | {
  **dict.fromkeys(("div", "gather", "dynamic_slice"), slice(1)),
  **dict.fromkeys(("scatter", "scatter-add"), slice(0, None, 2)),
  **{"dynamic_update_slice": slice(2), "select_n": slice(1, None)},
}
# Those that are linear in each of their two operands.
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
# Those that may sum over rows.
SUMS = {"reduce_sum", "dot_general", "conv_general_dilated", "scatter-add"}
# Those that combine elements along dimensions but keep these: the parameter.
ALONG = {
  **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), "axis"),
  **{"cumlogsumexp": "axis", "sort": "dimension", "rev": "dimensions"},
}


def mixed_rows(
  fn: Callable, params: Any, batch: dict, *others: Any
) -> str | None:
  """Returns how a loss uses other rows, in a sentence, or None.

  The loss is traced without arrays, and not compiled. What does not reach its
  results is no fault.

  Args:
    fn: (params, batch, *others) -> (sum, count, named), as `Learner.loss`.
    params: Arrays or `jax.ShapeDtypeStruct`.
    batch: Arrays by row, in nested dicts, with any number of rows. Those in
      batch["shared"] have no rows.
    others: Further arguments, without rows, such as a random key.

  Raises:
    Exception: As `fn`, with a note that names the number of rows.

  Example:
    >>> import numpy as np
    >>> batch = {"x": np.ones((4, 2)), "mask": np.ones(4)}
    >>> def loss(w, batch):
    ...   errors = w * batch["x"].sum(1) * batch["mask"]
    ...   return errors.sum(), batch["mask"].sum(), {}
    >>> mixed_rows(loss, 2.0, batch)
  """
  import jax

  others = (batch.get("shared"), *others)
  batch = {k: v for k, v in batch.items() if k != "shared"}
  sizes = [
    *(s for x in jax.tree.leaves((params, others)) for s in jax.numpy.shape(x)),
    *(s for x in jax.tree.leaves(batch) for s in x.shape[1:]),
  ]
  rows = next(p for p in PRIMES if not any(s and s % p == 0 for s in sizes))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch
  )

  def loss(params, batch, shared, *others):
    batch = batch if shared is None else batch | {"shared": shared}
    return fn(params, batch, *others)

  try:
    closed, out = jax.make_jaxpr(loss, return_shape=True)(
      params, batch, *others
    )
  except Exception as e:
    e.add_note(f"(The loss was traced with {rows:,} rows.)")
    raise
  trace = _Trace(rows)
  kinds = trace.program(closed, [PLAIN] * len(closed.in_avals))
  fault = _fault(kinds)
  kinds = jax.tree.unflatten(jax.tree.structure(out), kinds)
  pairs = ({"loss": x[:2], **x[2]}.items() for x in (kinds, out))
  for (name, pair), (_, arrays) in zip(*pairs, strict=True):
    if any(trace.axis(x.shape) is not None for x in arrays):
      fault = fault or f"returns a value for each row ({name})"
    if PLAIN in pair and SUM in pair:
      what = "count" if pair[0] is SUM else "sum"
      fault = fault or f"returns a {what} that is no sum over the rows ({name})"
  return fault and f"a loss that {fault}, {EXPECTED}"


class _Trace:
  """Finds the kinds of all results of a program, from its inputs on.

  rows: The prime number of rows.
  """

  def __init__(self, rows: int):
    self.rows = rows

  def axis(self, shape: Sequence[int]) -> int | None:
    """Returns the dimension of rows."""
    of_rows = (i for i, s in enumerate(shape) if s and s % self.rows == 0)
    return next(of_rows, None)

  def constant(self, x: Any) -> Kind:
    """Returns the kind of a constant. The number of rows is a sum of ones."""
    import jax.numpy as jnp

    dtype = jnp.result_type(x)
    if jnp.shape(x) or not jnp.issubdtype(dtype, jnp.number):
      return PLAIN
    if not x:
      return ZERO
    if not jnp.issubdtype(dtype, jnp.floating):
      return PLAIN
    size = max(abs(float(x)), 1 / abs(float(x)))
    if not size < 2**31:  # stands for infinity
      return PLAIN
    error = abs(math.remainder(size, self.rows))
    return SUM if error <= 2**-23 * size else PLAIN  # rounded to float32

  def program(self, jaxpr, inputs, line=None) -> list[Kind | str]:
    """Returns the kinds of a jaxpr's results.

    Args:
      jaxpr: The jaxpr, also a closed one.
      inputs: Kinds of its arguments.
      line: The equation whose line messages show; None: the faulty one. (jax
        keeps the jaxprs of its own functions, with the lines that called them
        first.)
    """
    consts = [self.constant(x) for x in getattr(jaxpr, "consts", ())]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    kinds = dict(zip(jaxpr.constvars, consts, strict=True))
    kinds.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom):
      return self.constant(atom.val) if hasattr(atom, "val") else kinds[atom]

    for equation in jaxpr.eqns:
      operands = [read(atom) for atom in equation.invars]
      results = self.equation(equation, operands, line or equation)
      kinds.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def equation(self, equation, inputs, line) -> list[Kind | str]:
    """Returns the kinds of an equation's results."""
    name, p = equation.primitive.name, equation.params
    shapes, outs = _shapes(equation.invars), _shapes(equation.outvars)
    if name == "scan":
      body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])
      # Only what is scanned and stacked has other shapes inside.
      m = sum(map(operator.eq, shapes, _shapes(body.invars)))
      n = m - sum(map(operator.eq, outs, _shapes(body.outvars)))
      if any(self.axis(shape[:1]) == 0 for shape in shapes[m:]):
        return len(outs) * [f"loops over the rows ({_place(name, line)})"]
      return self.loop(p["jaxpr"], inputs[:n], inputs[n:m], inputs[m:])
    if name == "while":
      n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
      carry = self.loop(p["body_jaxpr"], inputs[n:m], inputs[m:])
      test = self.program(p["cond_jaxpr"], [*inputs[:n], *carry])
      return len(outs) * test if _fault(test) else carry
    if name == "cond" and not _fault(inputs[:1]):
      branches = [self.program(b, inputs[1:]) for b in p["branches"]]
      return [_join(kinds) for kinds in zip(*branches, strict=True)]
    for value in p.values():  # a call has a jaxpr with the same inputs
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns") and _shapes(inner.invars) == shapes:
        return self.program(value, inputs, line if "jit" in name else None)
    if fault := _fault(inputs):
      return len(outs) * [fault]
    return [
      f"{kind} ({_place(name, line)})" if isinstance(kind, str) else kind
      for kind in (self.result(equation, inputs, out) for out in outs)
    ]

  def loop(self, body, consts, carry, xs=()) -> list[Kind | str]:
    """Returns the kinds of a body's results in any iteration."""
    while True:
      results = self.program(body, [*consts, *carry, *xs])
      new = [_join(pair) for pair in zip(carry, results, strict=False)]
      if new == carry:
        return carry + results[len(carry) :]
      carry = new

  def result(self, equation, inputs, out: Sequence[int]) -> Kind | str:
    """Returns the kind of a result of shape `out`, or how it uses rows."""
    name, shapes = equation.primitive.name, _shapes(equation.invars)
    has_rows = [self.axis(shape) is not None for shape in shapes]
    axis = self.axis(out)
    reduces = any(has_rows) and axis is None
    if math.prod(out) and math.prod(out) % self.rows**2 == 0:
      return "combines rows with other rows"
    if reduces and name not in SUMS:
      return "reduces or selects rows"
    if name in ALONG and axis in np.ravel(equation.params[ALONG[name]]):
      return "moves or adds up rows along the batch"
    if SUM in inputs and (any(has_rows) or axis is not None):
      return "combines a sum over the rows with rows"
    if name in PRODUCTS and inputs.count(SUM) < 2:
      return SUM if reduces or SUM in inputs else PLAIN
    linear = range(len(inputs))[LINEAR.get(name, slice(0))]
    if any(x is SUM for i, x in enumerate(inputs) if i not in linear):
      return "computes something else than a sum from a sum over the rows"
    if not linear:
      return PLAIN
    return _join(SUM if reduces and has_rows[i] else inputs[i] for i in linear)


def _fault(kinds: Iterable[Kind | str]) -> str | None:
  return next((kind for kind in kinds if isinstance(kind, str)), None)


def _join(kinds: Iterable[Kind | str]) -> Kind | str:
  """Returns the kind of what adds up some results, or is one of them."""
  kinds = [*kinds]
  if fault := _fault(kinds):
    return fault
  if PLAIN in kinds and SUM in kinds:
    return "adds to a sum over the rows a number that does not depend on rows"
  return next((kind for kind in (SUM, PLAIN) if kind in kinds), ZERO)


def _shapes(atoms) -> list[tuple[int, ...]]:
  return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


# Files of libraries, of Python itself, and of no file.
_LIBRARY = re.compile(
  r"/site-packages/(jax|flax|optax|einops)/"
  r"|/python3[.\d]*/(?!site-packages)|^<"
)


def _place(name: str, equation) -> str:
  """Returns the name of an operation, and the line that called it."""
  traceback = equation.source_info.traceback
  for frame in traceback.frames if traceback else ():
    if not _LIBRARY.search(frame.file_name):
      file = pathlib.Path(frame.file_name).name
      return f"`{name}`, {file} line {frame.line_num}"
  return f"`{name}`"

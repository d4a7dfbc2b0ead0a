"""Finds losses that use other rows: their value would depend on the mesh.

The step computes sums over the rows of each device and each microbatch, and
adds them up. So a loss may sum over rows what each row gives by itself. A loss
that compares rows, standardises over them or divides one sum by another has
another value for every number of devices and microbatches.

The loss is traced with a prime number of rows: a dimension that it divides is
one of rows. A result without such a dimension is the same for all rows, or a
sum over them, which only linear operations may use.

Which rows an index takes is not followed: a loss that gathers or scatters among
the rows of a batch passes, and so do random numbers drawn by their positions.
"""

import enum
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# No size of a model is a multiple of these primes, or another one is used.
PRIMES = (8191, 7919, 6133, 4093)

EXPECTED = (
  "but the step adds up the sums of all devices and microbatches, so that the"
  " result would depend on their number; expected sums over the rows of what"
  " each row gives by itself. What needs the whole batch belongs into"
  " `targets`, or into a loss with whole_batch=True."
)

ROWS = "combines rows with other rows"
ALONG_ROWS = "moves or adds up rows along the batch"
GROUPS = "divides the rows into groups"
REDUCES = "reduces or selects rows"
WITH_ROWS = "combines a sum over the rows with rows"
NOT_A_SUM = "computes something else than a sum from a sum over the rows"
ADDS = "adds to a sum over the rows a number that does not depend on rows"


class Kind(enum.Enum):
  """What is known of an intermediate result; a string says what is wrong."""

  PLAIN = "of each row by itself, or the same for all rows"
  ZERO = "zeros"
  SUM = "linear in sums over rows"


PLAIN, ZERO, SUM = Kind

# Primitives that are linear in some operands together: those operands.
ALL, FIRST = slice(None), slice(1)
LINEAR = {
  **dict.fromkeys(("add", "add_any", "sub", "neg", "reduce_sum"), ALL),
  **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), ALL),
  **dict.fromkeys(("transpose", "slice", "split", "concatenate", "pad"), ALL),
  **dict.fromkeys(("copy", "copy_p", "name", "convert_element_type"), ALL),
  **dict.fromkeys(("div", "gather", "dynamic_slice"), FIRST),
  "dynamic_update_slice": slice(2),
  "select_n": slice(1, None),
  **dict.fromkeys(("scatter", "scatter-add"), slice(0, None, 2)),
}
# Those that are linear in each operand alone.
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
  total, count, named = jax.tree.unflatten(
    jax.tree.structure(out), zip(kinds, closed.out_avals, strict=True)
  )
  for name, pair in {"loss": (total, count), **named}.items():
    (x, of_x), (n, of_n) = pair
    if any(trace.axis(aval.shape) is not None for aval in (of_x, of_n)):
      fault = fault or f"returns a value for each row ({name})"
    if (x is SUM) != (n is SUM) and ZERO not in (x, n):
      what = "count" if x is SUM else "sum"
      fault = fault or f"returns a {what} that is no sum over the rows ({name})"
  return fault and f"got a loss that {fault}, {EXPECTED}"


class _Trace:
  """Follows the rows through the equations of a program."""

  def __init__(self, rows: int):
    self.rows = rows

  def axis(self, shape: Sequence[int]) -> int | None:
    """Returns the dimension of rows."""
    of_rows = (i for i, s in enumerate(shape) if s and s % self.rows == 0)
    return next(of_rows, None)

  def strides(self, shape: Sequence[int]) -> set[int]:
    """Returns how far the next row may be in the flat array."""
    axis = self.axis(shape)
    if axis is None:
      return set()
    others = shape[axis] // self.rows  # e.g. tokens, merged with the rows
    step = math.prod(shape[axis + 1 :])
    return {step * n for n in range(1, others + 1) if others % n == 0}

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
    return SUM if error <= 2**-23 * size else PLAIN  # rounding of float32

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
    name, p, outs = equation.primitive.name, equation.params, equation.outvars
    if name == "scan":
      return self.scan(equation, inputs, line)
    if name == "while":
      n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
      carry = self.loop(p["body_jaxpr"], inputs[n:m], inputs[m:])
      (test,) = self.program(p["cond_jaxpr"], [*inputs[:n], *carry])
      return len(outs) * [test] if isinstance(test, str) else carry
    if name == "cond" and not isinstance(inputs[0], str):
      branches = [self.program(b, inputs[1:]) for b in p["branches"]]
      return [_join(kinds) for kinds in zip(*branches, strict=True)]
    if (inner := _inner(equation)) is not None:
      return self.program(
        inner, inputs, line if name in ("jit", "pjit") else None
      )
    if fault := _fault(inputs):
      return len(outs) * [fault]
    return [
      f"{kind} ({_place(name, line)})" if isinstance(kind, str) else kind
      for kind in (self.result(equation, inputs, s) for s in _shapes(outs))
    ]

  def scan(self, equation, inputs, line) -> list[Kind | str]:
    """Returns the kinds of a scan's results: what it carries, then stacks."""
    body = equation.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    shapes, outs = _shapes(equation.invars), _shapes(equation.outvars)
    # All but what is scanned and stacked have the same shapes inside.
    m = sum(map(operator.eq, shapes, _shapes(inner.invars)))
    n = m - sum(map(operator.eq, outs, _shapes(inner.outvars)))
    if any(self.axis(shape[:1]) is not None for shape in shapes[m:]):
      return len(outs) * [f"loops over the rows ({_place('scan', line)})"]
    return self.loop(body, inputs[:n], inputs[n:m], inputs[m:])

  def loop(self, body, consts, carry, xs=()) -> list[Kind | str]:
    """Returns the kinds of a body's results in any iteration."""
    while True:
      results = self.program(body, [*consts, *carry, *xs])
      new = [_join(pair) for pair in zip(carry, results, strict=False)]
      if new == carry:
        return carry + results[len(carry) :]
      carry = new

  def result(self, equation, inputs, out: Sequence[int]) -> Kind | str:
    """Returns the kind of a result of the shape `out`, or what is wrong."""
    name, p = equation.primitive.name, equation.params
    shapes = _shapes(equation.invars)
    has_rows = [self.axis(shape) is not None for shape in shapes]
    loses_rows = any(has_rows) and self.axis(out) is None
    if out and 0 not in out and math.prod(out) % self.rows**2 == 0:
      return ROWS
    if name in ALONG:
      along = p[ALONG[name]]
      along = along if isinstance(along, tuple) else (along,)
      if self.axis(out) in along:
        return ALONG_ROWS
    if name == "reshape" and any(has_rows):
      if not self.strides(shapes[0]) & self.strides(out):
        return GROUPS
    if loses_rows and name not in SUMS:
      return REDUCES
    if SUM in inputs and (any(has_rows) or self.axis(out) is not None):
      return WITH_ROWS
    if name in PRODUCTS:
      sums = inputs.count(SUM) + loses_rows
      return (PLAIN, SUM, NOT_A_SUM)[min(sums, 2)]
    linear = range(len(inputs))[LINEAR.get(name, slice(0))]
    if any(x is SUM for i, x in enumerate(inputs) if i not in linear):
      return NOT_A_SUM
    if not linear:
      return PLAIN
    return _join(
      SUM if loses_rows and has_rows[i] else inputs[i] for i in linear
    )


def _fault(kinds: Iterable[Kind | str]) -> str | None:
  return next((kind for kind in kinds if isinstance(kind, str)), None)


def _join(kinds: Iterable[Kind | str]) -> Kind | str:
  """Returns the kind of what adds up, or is one of, some results."""
  kinds = [*kinds]
  if fault := _fault(kinds):
    return fault
  if PLAIN in kinds and SUM in kinds:
    return ADDS
  return next((kind for kind in (SUM, PLAIN) if kind in kinds), ZERO)


def _shapes(atoms) -> list[tuple[int, ...]]:
  return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def _inner(equation):
  """Returns the jaxpr of a call: that of arguments of the same shapes."""
  for value in equation.params.values():
    jaxpr = getattr(value, "jaxpr", value)
    if hasattr(jaxpr, "eqns"):
      if _shapes(jaxpr.invars) == _shapes(equation.invars):
        return value
  return None


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

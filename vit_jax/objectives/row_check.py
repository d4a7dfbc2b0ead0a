"""Finds losses that use other rows: their value would depend on the mesh.

The step computes sums over the rows of each device and each microbatch, and
adds them up. So a loss may sum over rows what each row gives by itself. A loss
that compares rows, standardises over them or divides one sum by another has
another value for every number of devices and microbatches.
"""

import math
import pathlib
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, SupportsInt

# A loss is traced with as many rows as one of these prime numbers. A dimension
# that it divides is one of rows: no model has such a size.
PRIMES = (8191, 7919, 6133, 4093)

EXPECTED = (
  "but the step adds up the sums of all devices and microbatches, so that the"
  " result would depend on their number; expected sums over the rows of what"
  " each row gives by itself. What needs the whole batch belongs into"
  " `targets`, or into a loss with whole_batch=True."
)

NOT_A_SUM = "computes something else than a sum from a sum over the rows"
WITH_ROWS = "combines a sum over the rows with rows"
ADDS = "adds to a sum over the rows a number that does not depend on rows"
ROWS = "combines rows with other rows"
MOVES = "moves or selects rows"
UNKNOWN = "is not known to treat each row separately"
POSITION = "depends on the positions of rows in the batch"


class _Value(NamedTuple):
  """What is known of an intermediate result.

  Attributes:
    axis: The dimension of the rows. None if the value is the same for all rows,
      even if one of its dimensions has their number.
    inner: Neighbours along `axis` of the same row: the row of index i is
      (i // inner) % rows.
    is_sum: Whether it is linear in sums over the rows.
    is_zero: Whether it is known to be zeros.
    position: "row" if it is the position of each row in the batch, "other" if
      it follows from positions, otherwise None. A tuple for the parts of a
      concatenation along the last dimension, as of indices.
    fault: How it uses other rows, or None.
  """

  axis: int | None = None
  inner: int = 1
  is_sum: bool = False
  is_zero: bool = False
  position: str | tuple[str | None, ...] | None = None
  fault: str | None = None


class _Fault(Exception):
  """How an operation uses other rows."""


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
  values = jax.tree.leaves(
    (
      jax.tree.map(lambda _: _Value(), params),
      jax.tree.map(lambda _: _Value(axis=0), batch),
      jax.tree.map(lambda _: _Value(), others),
    ),
    is_leaf=lambda x: isinstance(x, _Value),
  )
  results = _Walk(rows).closed(closed, values)
  fault = next((v.fault for v in results if v.fault), None)
  if fault is None:
    results = jax.tree.unflatten(jax.tree.structure(out), results)
    fault = _result_fault(*results)
  return fault and f"got a loss that {fault}, {EXPECTED}"


def _result_fault(total: _Value, count: _Value, named: dict) -> str | None:
  """Returns why a sum and its count do not add up over devices, or None."""
  for name, pair in {"loss": (total, count), **named}.items():
    if any(v.axis is not None for v in pair):
      return f"returns a value for each row ({name})"
    if pair[0].is_sum != pair[1].is_sum and not any(v.is_zero for v in pair):
      what = "count" if pair[0].is_sum else "sum"
      return f"returns a {what} that is no sum over the rows ({name})"
  return None


# Primitives that are linear in all their operands together.
_ADDITIVE = {"add", "add_any", "sub"}
# Those that are linear in their only operand, or return their operands.
_LINEAR = {
  *("neg", "copy", "copy_p", "real", "imag", "reduce_precision", "name"),
  *("optimization_barrier", "sharding_constraint", "pvary", "device_put"),
  "convert_element_type",
}
_CALLS = {
  *("jit", "pjit", "closed_call", "core_call", "call", "shard_map"),
  *("remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
  *("custom_vjp_call_jaxpr", "custom_vmap_call"),
}


def _windows(p: dict, _: int) -> list[int]:
  return [i for i, size in enumerate(p["window_dimensions"]) if size != 1]


# Primitives that combine the elements along some dimensions, but keep the
# dimensions: (parameters, number of dimensions) -> those dimensions.
_ALONG: dict[str, Callable[[dict, int], Iterable[int]]] = {
  **dict.fromkeys(
    ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    lambda p, _: (p["axis"],),
  ),
  **dict.fromkeys(
    ("cholesky", "eig", "eigh", "svd", "lu", "qr", "geqrf", "triangular_solve"),
    lambda _, n: (n - 2, n - 1),
  ),
  **dict.fromkeys(
    (
      *("reduce_window", "reduce_window_sum", "reduce_window_max"),
      *("reduce_window_min", "select_and_gather_add", "select_and_scatter_add"),
    ),
    _windows,
  ),
  "rev": lambda p, _: p["dimensions"],
  "sort": lambda p, _: (p["dimension"],),
  "top_k": lambda _, n: (n - 1,),
  "approx_top_k": lambda p, n: (p["reduction_dimension"] % n,),
  "fft": lambda p, n: range(n - len(p["fft_lengths"]), n),
}


class _Walk:
  """Follows the rows through the equations of a program.

  Methods named `on_PRIMITIVE` have the equation, the values and shapes of its
  operands and the shapes of its results. They return the value of all results,
  or a list, or raise `_Fault`.
  """

  def __init__(self, rows: int):
    self.rows = rows

  def closed(self, closed, inputs, call=None) -> list[_Value]:
    """Returns the results of a jaxpr.

    Args:
      closed: The closed jaxpr.
      inputs: Values of its arguments.
      call: The equation whose line messages show; None: the faulty one. (jax
        keeps the jaxprs of its own functions, with the lines that called them
        first.)
    """
    values = {
      var: self.constant(x)
      for var, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    }
    values |= dict(zip(closed.jaxpr.invars, inputs, strict=True))

    def read(atom):
      return self.constant(atom.val) if hasattr(atom, "val") else values[atom]

    for equation in closed.jaxpr.eqns:
      results = self.equation(
        equation, [read(atom) for atom in equation.invars], call or equation
      )
      values |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]

  def constant(self, x) -> _Value:
    """Returns the value of a constant. The number of rows is a sum of ones."""
    import jax.numpy as jnp

    dtype = jnp.result_type(x)
    if jnp.shape(x) or not jnp.issubdtype(dtype, jnp.number):
      return _Value()
    is_sum = jnp.issubdtype(dtype, jnp.floating) and self.counts(float(x))
    return _Value(is_sum=is_sum, is_zero=not x)

  def counts(self, number: float) -> bool:
    """Whether a number is a multiple of that of rows, or one over it."""
    size = abs(number)
    size = 1 / size if 0 < size < 1 else size
    if not self.rows <= size < 2**31:  # larger ones stand for infinity
      return False
    multiple = round(size / self.rows) * self.rows
    return abs(size - multiple) <= 2**-23 * size  # as float32 rounds

  def equation(self, equation, inputs, call) -> list[_Value]:
    """Returns the results of an equation."""
    name = equation.primitive.name
    if name in _CALLS and (inner := _inner(equation)) is not None:
      return self.closed(
        inner, inputs, call if name in ("jit", "pjit") else None
      )
    if name in ("scan", "while", "cond"):
      return getattr(self, f"{name}_")(equation, inputs, call)
    shapes, outs = (
      [tuple(getattr(v.aval, "shape", ())) for v in atoms]
      for atoms in (equation.invars, equation.outvars)
    )
    fault = next((v.fault for v in inputs if v.fault), None)
    if fault is None:
      try:
        if any(0 not in s and math.prod(s) % self.rows**2 == 0 for s in outs):
          raise _Fault(ROWS)
        result = self.rule(name, shapes, outs)(equation, inputs, shapes, outs)
        return result if isinstance(result, list) else len(outs) * [result]
      except _Fault as e:
        fault = f"{e} ({_place(name, call)})"
    return len(outs) * [_Value(fault=fault)]

  def rule(self, name, shapes, outs):
    """Returns the method for a primitive."""
    if name in _ALONG:
      return self.along
    if name.startswith("scatter"):
      return self.scatter
    if name.startswith("reduce_") and name != "reduce_precision":
      return self.reduce
    # Few primitives broadcast: scalars, and all dimensions of length 1.
    by_element = all(
      not s
      or (
        len(s) == len(outs[0])
        and all(a in (1, b) for a, b in zip(s, outs[0], strict=True))
      )
      for s in (*shapes, *outs)
    )
    return getattr(
      self, f"on_{name}", self.by_element if by_element else self.unknown
    )

  def dimension(self, value: _Value, shape) -> int | None:
    """Returns the dimension of rows, also if all rows are the same."""
    if value.axis is not None:
      return value.axis
    of_rows = (i for i, s in enumerate(shape) if s and s % self.rows == 0)
    return next(of_rows, None)

  def by_element(self, equation, inputs, shapes, outs):
    name = equation.primitive.name
    if any(v.is_sum for v in inputs):
      return self.of_sums(equation, inputs)
    result = _together(inputs)
    if name in _LINEAR:
      return result._replace(is_zero=all(v.is_zero for v in inputs))
    if name in _ADDITIVE and all(v.is_zero for v in inputs):
      return result._replace(is_zero=True)
    # Python's negative indices, and x % rows, are positions again.
    wraps = name in ("add", "rem") and (
      bool(getattr(equation.invars[1], "val", 0) == self.rows)
    )
    if result.position and not wraps:
      return result._replace(position="other")
    return result

  def of_sums(self, equation, inputs):
    """Operations by element on sums."""
    name = equation.primitive.name
    sums = [v.is_sum for v in inputs]
    if any(v.axis is not None for v in inputs):
      raise _Fault(WITH_ROWS)
    if name == "select_n" and not sums[0]:
      return _join(inputs[1:])
    if name in _ADDITIVE:
      if not all(v.is_sum or v.is_zero for v in inputs):
        raise _Fault(ADDS)
    elif name == "convert_element_type":
      # Whole numbers and truth values are no linear function of floats.
      old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
      if "bool" in str(new) or ("float" in str(old) and "int" in str(new)):
        raise _Fault(NOT_A_SUM)
    elif not (
      name in _LINEAR
      or (name == "mul" and sum(sums) == 1)
      or (name == "div" and sums == [True, False])
    ):
      raise _Fault(NOT_A_SUM)
    return _Value(is_sum=True)

  def unknown(self, equation, inputs, shapes, outs):
    """Primitives without a rule: in most kernels the batch comes first."""
    if any(v.is_sum for v in inputs):
      raise _Fault(NOT_A_SUM)
    result = _together(inputs)
    if result.axis is None or (
      result == _Value(axis=0) and all(s[:1] == (self.rows,) for s in outs)
    ):
      return result
    raise _Fault(UNKNOWN)

  def along(self, equation, inputs, shapes, outs):
    name = equation.primitive.name
    if any(v.is_sum for v in inputs) and name not in ("cumsum", "rev"):
      raise _Fault(NOT_A_SUM)
    result = _together(inputs)
    ndim = max(map(len, shapes))
    if result.axis in _ALONG[name](equation.params, ndim) or result.position:
      raise _Fault(MOVES)
    return result._replace(is_sum=any(v.is_sum for v in inputs))

  def reduce(self, equation, inputs, shapes, outs):
    adds = equation.primitive.name == "reduce_sum"
    axes = equation.params["axes"]
    result = _together(inputs)
    is_sum, is_zero = inputs[0].is_sum, inputs[0].is_zero
    if is_sum and not adds:
      raise _Fault(NOT_A_SUM)
    if result.axis in axes and (result.position or not adds):
      raise _Fault(POSITION if result.position else "reduces the rows")
    if adds and self.dimension(result, shapes[0]) in axes:
      return _Value(is_sum=not is_zero, is_zero=is_zero)
    if result.axis is None:
      return _Value(is_sum=is_sum, is_zero=is_zero)
    return _moved(result, result.axis - sum(a < result.axis for a in axes))

  on_argmax = on_argmin = reduce

  def on_select_n(self, equation, inputs, shapes, outs):
    if any(v.is_sum for v in inputs):
      return self.of_sums(equation, inputs)
    is_position = all(v.position == "row" for v in inputs[1:])
    return _together(inputs)._replace(
      is_zero=all(v.is_zero for v in inputs[1:]),
      **({"position": "row"} if is_position else {}),
    )

  def on_iota(self, equation, inputs, shapes, outs):
    axis = equation.params["dimension"]
    if outs[0][axis] != self.rows:
      return _Value()
    return _Value(axis=axis, position="row")

  def on_broadcast_in_dim(self, equation, inputs, shapes, outs):
    value = inputs[0]
    if value.is_sum and self.dimension(_Value(), outs[0]) is not None:
      raise _Fault(WITH_ROWS)
    if value.axis is None:
      return value
    return _moved(value, equation.params["broadcast_dimensions"][value.axis])

  def on_reshape(self, equation, inputs, shapes, outs):
    value = inputs[0]
    if value.axis is None:
      return value
    # The row of element i of the flat array is (i // stride) % rows.
    stride = value.inner * math.prod(shapes[0][value.axis + 1 :])
    for axis, size in enumerate(outs[0]):
      inner, rest = divmod(stride, math.prod(outs[0][axis + 1 :]))
      if inner and not rest and size % (inner * self.rows) == 0:
        return _moved(value, axis)._replace(inner=inner)
    raise _Fault("divides the rows into groups")

  def on_transpose(self, equation, inputs, shapes, outs):
    (value,) = inputs
    if value.axis is None:
      return value
    return _moved(value, [*equation.params["permutation"]].index(value.axis))

  def on_squeeze(self, equation, inputs, shapes, outs):
    (value,) = inputs
    if value.axis is None:
      return value
    gone = sum(d < value.axis for d in equation.params["dimensions"])
    return _moved(value, value.axis - gone)

  def on_slice(self, equation, inputs, shapes, outs):
    (value,) = inputs
    if value.axis is None:
      return value
    p, axis = equation.params, value.axis
    bounds = p["start_indices"][axis], p["limit_indices"][axis]
    stride = p["strides"][axis] if p["strides"] else 1
    if stride != 1 or any(b % (value.inner * self.rows) for b in bounds):
      raise _Fault(MOVES)
    return _moved(value, axis)

  def on_split(self, equation, inputs, shapes, outs):
    (value,) = inputs
    sizes = equation.params["sizes"]
    if value.axis == equation.params["axis"] and any(
      size % (value.inner * self.rows) for size in sizes
    ):
      raise _Fault(MOVES)
    return value if value.axis is None else _moved(value, value.axis)

  def on_concatenate(self, equation, inputs, shapes, outs):
    dimension = equation.params["dimension"]
    if any(v.is_sum for v in inputs):
      return _join(inputs)
    result = _together([v._replace(position=None) for v in inputs])
    if result.axis == dimension and any(
      s[dimension] % (result.inner * self.rows) for s in shapes
    ):
      raise _Fault(MOVES)
    if not any(v.position for v in inputs):
      return result._replace(is_zero=all(v.is_zero for v in inputs))
    if result.axis == dimension or dimension != len(outs[0]) - 1:
      raise _Fault(POSITION)
    parts = [
      part
      for value, shape in zip(inputs, shapes, strict=True)
      for part in (
        value.position
        if isinstance(value.position, tuple)
        else shape[dimension] * (value.position,)
      )
    ]
    return result._replace(position=tuple(parts))

  def on_pad(self, equation, inputs, shapes, outs):
    value, filler = inputs
    if value.is_sum or filler.is_sum:
      return _join(inputs)
    if value.axis is None:
      return _Value(is_zero=value.is_zero and filler.is_zero)
    if any(equation.params["padding_config"][value.axis]):
      raise _Fault(MOVES)
    return _moved(value, value.axis)

  def on_dynamic_slice(self, equation, inputs, shapes, outs):
    value, *starts = inputs
    return self.block(value, starts, shapes[0], outs[0])

  def on_dynamic_update_slice(self, equation, inputs, shapes, outs):
    value, update, *starts = inputs
    update = self.block(update, starts, shapes[1], shapes[0])
    if value.is_sum or update.is_sum:
      return _join([value, update])
    return _together([value, update])

  def block(self, value, starts, shape, other):
    """A block from or for an array of another shape."""
    if any(v.is_sum for v in starts):
      raise _Fault(NOT_A_SUM)
    if value.axis is None:
      return value
    if shape[value.axis] != other[value.axis]:
      raise _Fault(MOVES)
    return _moved(value, value.axis)

  def on_dot_general(self, equation, inputs, shapes, outs):
    if any(v.is_sum for v in inputs):
      if any(v.axis is not None for v in inputs):
        raise _Fault(WITH_ROWS)
      if all(v.is_sum for v in inputs):
        raise _Fault(NOT_A_SUM)
      return _Value(is_sum=True)
    if any(v.position for v in inputs):
      raise _Fault(POSITION)
    contracted, batched = equation.params["dimension_numbers"]
    places = set()  # of the rows in the result; "sum" if they are summed
    for side in (0, 1):
      axis = self.dimension(inputs[side], shapes[side])
      if axis in contracted[side]:
        places.add(("sum", contracted[side].index(axis)))
      elif axis in batched[side]:
        places.add(("place", batched[side].index(axis)))
      elif axis is not None:
        gone = {*contracted[side], *batched[side]}
        place = len(batched[0]) + sum(d not in gone for d in range(axis))
        if side == 1:
          gone = len(batched[0]) + len(contracted[0])
          place += len(shapes[0]) - gone
        places.add(("place", place))
    if len(places) > 1:
      raise _Fault(ROWS)
    result = _together(inputs)
    if not places:
      return result
    ((kind, place),) = places
    if kind == "sum":
      return _Value(is_sum=True)
    return result if result.axis is None else _moved(result, place)

  def on_conv_general_dilated(self, equation, inputs, shapes, outs):
    images, kernel = inputs
    if images.is_sum or kernel.is_sum:
      if any(v.axis is not None for v in inputs):
        raise _Fault(WITH_ROWS)
      if images.is_sum and kernel.is_sum:
        raise _Fault(NOT_A_SUM)
      return _Value(is_sum=True)
    numbers = equation.params["dimension_numbers"]
    if images.axis is None and kernel.axis is None:
      return _Value()
    if (
      kernel.axis is not None
      or images.axis != numbers.lhs_spec[0]
      or equation.params["batch_group_count"] != 1
    ):
      raise _Fault(UNKNOWN)
    return _moved(images, numbers.out_spec[0])

  def on_gather(self, equation, inputs, shapes, outs):
    value, index = inputs
    n = equation.params["dimension_numbers"]
    if index.is_sum:
      raise _Fault(NOT_A_SUM)
    if value.axis is None and index.axis is None:
      return value
    axis = self.dimension(value, shapes[0])
    index_axis = self.dimension(index, shapes[1])
    places = [d for d in range(len(outs[0])) if d not in n.offset_dims]
    if axis is None:
      if index.position:
        raise _Fault(POSITION)
      return _Value(axis=places[index_axis], inner=index.inner)
    if axis in n.operand_batching_dims:
      number = n.operand_batching_dims.index(axis)
      if n.start_indices_batching_dims[number] == index_axis:
        return _together(inputs, axis=places[index_axis])
    elif axis in n.collapsed_slice_dims:
      if _is_position(index, n.start_index_map.index(axis)):
        return _Value(axis=places[index_axis], inner=index.inner)
    elif index_axis is not None:
      raise _Fault(ROWS)
    elif equation.params["slice_sizes"][axis] == shapes[0][axis]:
      gone = {*n.collapsed_slice_dims, *n.operand_batching_dims}
      number = sum(d not in gone for d in range(axis))
      return _moved(value, n.offset_dims[number])
    raise _Fault(MOVES)

  def scatter(self, equation, inputs, shapes, outs):
    """Writes updates to places of an array, or adds them there."""
    value, index, update = inputs
    adds = equation.primitive.name in ("scatter-add", "scatter_add")
    n = equation.params["dimension_numbers"]
    if value.is_sum or update.is_sum:
      if any(v.axis is not None for v in inputs):
        raise _Fault(WITH_ROWS)
      return _join([value, update])
    if index.is_sum:
      raise _Fault(NOT_A_SUM)
    if all(v.axis is None for v in inputs):
      return _Value()
    axis = self.dimension(value, shapes[0])
    result = _together(
      [v._replace(axis=0, position=None) for v in inputs if v.axis is not None],
      axis=axis,
    )
    if axis is None:  # updates of several rows for one place
      if adds and value.is_zero and not index.position:
        return _Value(is_sum=True)
      raise _Fault(ADDS if adds else MOVES)
    if axis in n.operand_batching_dims:
      number = n.operand_batching_dims.index(axis)
      place = n.scatter_indices_batching_dims[number]
      if self.dimension(index, shapes[1]) == place:
        return result
    elif axis in n.inserted_window_dims:
      if _is_position(index, n.scatter_dims_to_operand_dims.index(axis)):
        return result
    elif index.axis is None:
      gone = {*n.inserted_window_dims, *n.operand_batching_dims}
      number = sum(d not in gone for d in range(axis))
      place = n.update_window_dims[number]
      if shapes[2][place] == shapes[0][axis] and update.axis in (None, place):
        return result
    raise _Fault(MOVES)

  def on_random_bits(self, equation, inputs, shapes, outs):
    (keys,) = inputs
    if keys.is_sum:
      raise _Fault(NOT_A_SUM)
    # The shape of the result is that of the keys and another.
    if self.dimension(_Value(), outs[0][len(shapes[0]) :]) is not None:
      raise _Fault("draws random numbers by the positions of rows in the batch")
    return keys

  on_random_split = on_random_bits

  def on_random_wrap(self, equation, inputs, shapes, outs):
    return inputs[0]  # the dimension at the end goes

  on_random_unwrap = on_random_wrap  # it comes

  def scan_(self, equation, inputs, call) -> list[_Value]:
    closed = equation.params["jaxpr"]
    num_xs, num_ys = (
      sum(a.aval.shape != b.aval.shape for a, b in zip(*pair, strict=True))
      for pair in (
        (equation.invars, closed.jaxpr.invars),
        (equation.outvars, closed.jaxpr.outvars),
      )
    )
    m = len(inputs) - num_xs
    n = m - (len(equation.outvars) - num_ys)
    consts, carry, xs = inputs[:n], inputs[n:m], inputs[m:]
    if any(v.axis == 0 for v in xs):
      fault = f"loops over the rows ({_place('scan', call)})"
      return [_Value(fault=fault) for _ in equation.outvars]
    xs = [v if v.axis is None else _moved(v, v.axis - 1) for v in xs]
    run = lambda carry: self.closed(closed, [*consts, *carry, *xs])
    carry = _fixpoint(lambda carry: run(carry)[: m - n], carry)
    ys = run(carry)[m - n :]
    return [
      *carry,
      *(v if v.axis is None else _moved(v, v.axis + 1) for v in ys),
    ]

  def while_(self, equation, inputs, call) -> list[_Value]:
    p = equation.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = _fixpoint(
      lambda carry: self.closed(p["body_jaxpr"], [*inputs[n:m], *carry]),
      inputs[m:],
    )
    test = self.closed(p["cond_jaxpr"], [*inputs[:n], *carry])[0]
    return [_Value(fault=test.fault) if test.fault else v for v in carry]

  def cond_(self, equation, inputs, call) -> list[_Value]:
    test, *arguments = inputs
    branches = [
      self.closed(branch, arguments) for branch in equation.params["branches"]
    ]
    results = [_join(values) for values in zip(*branches, strict=True)]
    return [_Value(fault=test.fault) if test.fault else v for v in results]


def _together(values: list[_Value], axis: int | None = None) -> _Value:
  """Returns the value of what is computed row by row from some values.

  Args:
    values: Values of operands.
    axis: The dimension of rows in the result; None: that of the operands, in
      which it is then the same.
  """
  values = [v for v in values if v.axis is not None]
  if not values:
    return _Value()
  layouts = {(v.axis if axis is None else axis, v.inner) for v in values}
  if len(layouts) > 1:
    raise _Fault(ROWS)
  known = {v.position for v in values}
  if len(known) > 1 and known != {"row", "other"}:
    raise _Fault(POSITION)
  ((axis, inner),) = layouts
  return _Value(
    axis, inner, position="other" if len(known) > 1 else known.pop()
  )


def _moved(value: _Value, axis: SupportsInt) -> _Value:
  """Returns the value of the same rows in another dimension."""
  if isinstance(value.position, tuple):
    raise _Fault(POSITION)
  return value._replace(axis=int(axis), is_zero=False)


def _join(values: Iterable[_Value]) -> _Value:
  """Returns the value of what is one, or consists, of some values."""
  result, *others = values
  for other in others:
    if fault := result.fault or other.fault:
      return _Value(fault=fault)
    if result.is_sum != other.is_sum:
      if not (result.is_zero or other.is_zero):
        return _Value(fault=ADDS)
      result = _Value(is_sum=True)
      continue
    try:
      together = _together([result, other])
    except _Fault as e:
      return _Value(fault=str(e))
    result = together._replace(
      is_sum=result.is_sum, is_zero=result.is_zero and other.is_zero
    )
  return result


def _fixpoint(fn: Callable, carry: list[_Value]) -> list[_Value]:
  """Returns the values that a loop carries, in any iteration."""
  while True:
    new = [_join(pair) for pair in zip(carry, fn(carry), strict=True)]
    if new == carry:
      return carry
    carry = new


def _is_position(index: _Value, part: int) -> bool:
  """Whether a part of an index is the position of each row."""
  known = index.position
  return (known[part] if isinstance(known, tuple) else known) == "row"


def _inner(equation):
  """Returns the closed jaxpr of a call, or None."""
  from jax.extend.core import ClosedJaxpr

  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
    inner = equation.params.get(key)
    if hasattr(inner, "eqns") and not hasattr(inner, "consts"):
      inner = ClosedJaxpr(inner, ())
    if inner is not None and len(inner.jaxpr.invars) == len(equation.invars):
      return inner
  return None


_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "chex", "einops"}


def _place(name: str, equation) -> str:
  """Returns the name of an operation, and the line that called it."""
  standard = sysconfig.get_path("stdlib")
  traceback = equation.source_info.traceback
  for frame in traceback.frames if traceback else ():
    _, _, installed = frame.file_name.rpartition("site-packages/")
    if (
      installed.partition("/")[0] not in _LIBRARIES
      if installed != frame.file_name
      else not installed.startswith((standard, "<"))
    ):
      return f"`{name}`, {pathlib.Path(installed).name} line {frame.line_num}"
  return f"`{name}`"

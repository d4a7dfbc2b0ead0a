"""The variables that a linen module makes: its parameters, and nothing else."""

from collections.abc import Mapping
from typing import Any


def only_params(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the parameters among the result of `module.init`.

  Args:
    variables: Collection -> nested dict of arrays or shapes.

  Raises:
    ValueError: There is another collection, such as the "batch_stats" of
      BatchNorm, which a step would have to change.

  Example:
    >>> only_params({"params": {"bias": 0.0}})
    {'bias': 0.0}
  """
  if others := sorted(variables.keys() - {"params"}):
    raise ValueError(
      f"config.model: the module makes the collection {', '.join(others)},"
      " expected params alone: a step changes no other variables. A norm"
      " without running means, such as LayerNorm or GroupNorm, needs none."
    )
  return variables["params"]

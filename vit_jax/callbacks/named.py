"""The callbacks that a config names, `config.callbacks`."""

from collections.abc import Iterable

from vit_jax import names
from vit_jax.callbacks.base import Callback


def from_names(texts: Iterable[str], errors: list[str]) -> list[Callback]:
  """Returns an object of each class that a config names.

  Args:
    texts: Import paths, possibly with keyword arguments, such as
      "my_lab.monitor:Cosine(decay=0.9)".
    errors: Gets a message for each class that cannot be imported or made.
  """
  callbacks, where = [], "config.callbacks"
  for text in texts:
    path, arguments = names.split(text)
    try:
      cls = names.resolve(path, {}, where, Callback)
      keywords = names.keywords(arguments or "", where)
      callbacks.append(_made(cls, keywords, f"{where}: got {text!r}"))
    except ValueError as e:
      errors.append(str(e))
  return callbacks


def _made(cls: type[Callback], keywords: dict, got: str) -> Callback:
  try:
    return cls(**keywords)
  except Exception as e:  # a class of one's own may raise anything
    raise ValueError(f"{got}, which raises {type(e).__name__}: {e}.") from e

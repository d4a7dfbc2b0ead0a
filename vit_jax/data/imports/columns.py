"""Which column has the images, and which the labels."""

from collections.abc import Mapping

LABELS = ("label", "labels", "class", "target", "fine_label", "category")


def pick(
  role: str,
  candidates: Mapping[str, str],
  others: Mapping[str, str],
  wanted: str | None,
  where: str,
) -> str:
  """Returns the column of the images or of the labels.

  Args:
    role: "image" or "label", the name of the flag.
    candidates: Columns that could be it -> their types.
    others: All further columns -> their types.
    wanted: The column that the user names, if any.
    where: The source, for messages.

  Raises:
    ValueError: The column is not there or of another type; or none could be
      it; or several, of which none has the usual name.
  """
  if wanted is not None and wanted in candidates:
    return wanted
  usual = LABELS if role == "label" else ("image", "img", "jpg", "png")
  known = [name for name in usual if name in candidates]
  if wanted is None and (known or len(candidates) == 1):
    return known[0] if known else next(iter(candidates))
  expected = {
    "image": "encoded images (bytes, or a struct with bytes)",
    "label": "whole numbers or text",
  }[role]
  got = "no column" if wanted is None else f"column {wanted!r}"
  if wanted is None and candidates:
    got = f"several columns ({', '.join(candidates)})"
  listed = ", ".join(f"{k}: {v}" for k, v in {**candidates, **others}.items())
  raise ValueError(
    f"--{role}: got {got} for the {role} in {where}, expected the name of one"
    f" with {expected}, of: {listed}."
  )

"""The tables of `vit-jax score`, as text."""

from typing import Any


def scores(rows: list[dict[str, Any]]) -> str:
  """Returns the scores beside the published ones, as text."""
  lines = [
    (
      *("file", "on", "images", "top-1", "top-5"),
      *("published", "", "difference", "source"),
    )
  ]
  for row in rows:
    source = row["source"] or "no published score known by this name"
    if row["source"] and not row["same_pixels"]:
      source += " (other preprocessing)"
    lines.append(
      (
        row["file"],
        row["on"],
        f"{row['images']:,}",
        *(
          _percent(row[key])
          for key in ("top1", "top5", "published_top1", "published_top5")
        ),
        "" if row["difference"] is None else f"{row['difference']:+.2f}",
        source,
      )
    )
  return _aligned(lines, left=(0, 1, 8))


def swaps(rows: list[dict[str, Any]]) -> str:
  """Returns the rows of one file as text."""
  lines = [
    (
      *("on", "step", "is", "instead", "top-1", "change", "error"),
      *("gained", "lost", "other answers"),
    )
  ]
  for row in rows:
    lines.append(
      (
        *(row[key] for key in ("on", "step", "was", "value")),
        f"{row['top1']:.2f}",
        f"{row['change']:+.2f}",
        f"{row['error']:.2f}",
        f"+{row['gained']:,}",
        f"-{row['lost']:,}",
        f"{row['other']:,} of {row['images']:,}",
      )
    )
  return _aligned(lines, left=(0, 1, 2, 3))


def _aligned(lines: list[tuple[str, ...]], left: tuple[int, ...]) -> str:
  """Returns cells in columns; those in `left` begin where the column does."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      f"{cell:<{w}}" if i in left else f"{cell:>{w}}"
      for i, (cell, w) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )


def _percent(value: float | None) -> str:
  return "" if value is None else f"{value:.2f}"

"""Writes tables into pages.

A table is between the lines `<!-- table NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Mapping


def with_tables(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
  """Returns a page in which the tables of these names are made anew."""

  def table(match: re.Match) -> str:
    if match[1] not in tables:
      return match[0]
    return f"<!-- table {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->"

  pattern = r"<!-- table (\w+) -->\n.*?<!-- end -->"
  return re.sub(pattern, table, text, flags=re.DOTALL)

"""Links between the pages: every file is there, and every heading."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def prose(page: pathlib.Path) -> str:
  """Returns the text of a page without its blocks of code."""
  return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchor(heading: str) -> str:
  """Returns a heading's name in links, as GitHub makes it.

  Example:
    >>> anchor("Compile every program: `--all`")
    'compile-every-program---all'
  """
  kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
  return kept.replace(" ", "-")


def dead(page: pathlib.Path, text: str) -> list[str]:
  """Returns the links of a page's text that lead nowhere in the repository."""
  found = []
  for link in re.findall(r"\]\(([^)\s]+)\)", text):
    path, _, name = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if "://" in link:
      continue
    if not target.exists():
      found.append(link)
    elif name and target.suffix == ".md":
      headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
      if name not in map(anchor, headings):
        found.append(link)
  return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(page):
  assert dead(page, prose(page)) == []


def test_a_dead_link_is_found():
  text = "[a](docs/none.md) [b](README.md#install) [c](README.md#no-such-one)"
  assert dead(ROOT / "README.md", text) == [
    "docs/none.md",
    "README.md#no-such-one",
  ]

"""All links to the repository have the address of pyproject.toml."""

import re

import address

ROOT = address.ROOT
# What a link to this repository looks like, whatever its owner.
LINKS = (
  r"git clone (?:https://github\.com/)?(\S+?)(?:\.git)?\s",
  r"git\+https://github\.com/([\w.-]+/[\w-]+)",
  r"colab\.research\.google\.com/github/([^/]+/[^/]+)/blob/",
  r"https://github\.com/([\w.-]+/vit_jax)\b",
  r'REPOSITORY = \\"https://github\.com/([^\\]+)\\"',  # in a notebook
)


def test_all_places_agree():
  notebooks = [*(ROOT / "notebooks").glob("*.ipynb")]
  pages = ["README.md", "CITATION.cff", "pyproject.toml", "docs/tasks/pod.md"]
  for path in [ROOT / page for page in pages] + notebooks:
    text = path.read_text()
    found = [name for link in LINKS for name in re.findall(link, text, re.M)]
    assert {*found} == {address.present()}, path
    # Colab's link, and the address of the first cell.
    assert len(found) >= 2 or path not in notebooks, path

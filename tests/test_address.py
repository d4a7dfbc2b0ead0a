"""All links to the repository have the address of pyproject.toml."""

import re
import subprocess

import address
import pytest

ROOT = address.ROOT
# What a link to this repository looks like, whatever its owner.
LINKS = (
  r"git clone (?:https://github\.com/)?(\S+?)(?:\.git)?\s",
  r"git\+https://github\.com/([\w.-]+/[\w-]+)",
  r"colab\.research\.google\.com/github/([^/]+/[^/]+)/blob/",
  r"https://github\.com/([\w.-]+/vit_jax)\b",
  r'REPOSITORY = \\"https://github\.com/([^\\]+)\\"',  # in a notebook
)


def text_files():
  for name in ("README.md", "CITATION.cff", "pyproject.toml"):
    yield ROOT / name
  for folder, pattern in (("docs", "**/*.md"), ("notebooks", "*.ipynb")):
    yield from sorted((ROOT / folder).glob(pattern))


def test_all_places_agree():
  expected, seen = address.present(), []
  for path in text_files():
    text = path.read_text()
    for pattern in LINKS:
      for found in re.findall(pattern, text, re.M):
        assert found == expected, f"{path.relative_to(ROOT)}: {found}"
        seen.append(path.name)
  for name in ("README.md", "pod.md"):
    assert name in seen
  for path in (ROOT / "notebooks").glob("*.ipynb"):
    assert seen.count(path.name) >= 2, path.name  # Colab's link, REPOSITORY


@pytest.fixture
def checkout(tmp_path):
  files = {
    "pyproject.toml": '[project.urls]\nRepository = "https://github.com/A/b"\n',
    "README.md": "git clone https://github.com/A/b vit_jax; A/b, A/b-c\n"
    "https://github.com/A/b/actions https://github.com/A/b-c\n",
    "n.ipynb": "https://colab.research.google.com/github/A/b/blob/main/n.ipynb",
    "other.md": "https://github.com/A/other",
  }
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  (tmp_path / "picture.png").write_bytes(b"\x89PNG https://github.com/A/b")
  for command in (["init", "-q"], ["add", "-A"]):
    subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
  return tmp_path


def test_writes_every_place(checkout):
  files = address.write("https://github.com/me/mine.git", checkout)
  names = {path.name for path in files}
  assert names == {"README.md", "n.ipynb", "pyproject.toml"}
  assert address.present(checkout) == "me/mine"
  assert (checkout / "README.md").read_text() == (
    "git clone https://github.com/me/mine vit_jax; A/b, A/b-c\n"
    "https://github.com/me/mine/actions https://github.com/A/b-c\n"
  )
  assert "google.com/github/me/mine/blob" in (checkout / "n.ipynb").read_text()
  address.write("https://github.com/A/b", checkout)
  assert address.present(checkout) == "A/b"


def test_an_address_elsewhere_is_refused(checkout):
  for wrong in ("me/mine", "https://gitlab.com/me/mine", ""):
    with pytest.raises(ValueError, match="https://github.com"):
      address.write(wrong, checkout)
  assert address.present(checkout) == "A/b"

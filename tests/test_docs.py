"""Runs the code of pages in docs/, and looks up what all pages name.

Blocks of a section run in order, in a folder of their own that has the
repository's tests/data. What a block prints must be the ```text block behind
it, if there is one. `python tests/test_docs.py [PAGE]` writes these anew.

A block that begins with "# Without vit_jax" runs in a process of its own, in
which that import fails; one that begins with "# NAME.py" is written to a file.
The other blocks of a section share a process: the tests' own one, or one with
a single device for the sections in `SLOW` and to write them anew.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import compute
import options
import pytest
import study
import study_report

from vit_jax.commands import COMMANDS
from vit_jax.config import config_files
from vit_jax.data.sources import open_source

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("weights", "tour", "predict", "export", "trackers")
ALONE = "# Without vit_jax"
# What a section needs of the libraries that only `make test-all` installs.
NEEDS = {
  "ONNX": ("jax2onnx", "onnxruntime"),
  "Without a network": ("wandb", "mlflow"),
}
# Sections that start processes of their own, or need one device.
SLOW = (
  "Details",
  "Convert",
  "Into other Flax code",
  "From other Flax code",
  "The walk",
  "Classes of images",
  "Features of a folder",
  "Files, folders, globs, standard input",
  "Where the model looks",
  "Few-shot and linear probes",
  "A writer of your own",
  "StableHLO",
  "Without Flax: StableHLO",
  "Hugging Face",
  *NEEDS,
)

BLOCK = re.compile(
  r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
  r"(?:\n```text\n(?P<output>.*?)^```\n)?",
  re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of code; `line` is that of its first line of code."""

  page: str
  section: str
  line: int
  kind: str
  code: str
  output: str | None
  span: tuple[int, int]  # of the output in the text

  @property
  def file(self) -> str | None:
    """Its name, where the block is one."""
    match = re.match(r"# (\w+\.py)\n", self.code)
    return match[1] if match else None


def path_of(page: str) -> pathlib.Path:
  return ROOT / "docs" / f"{page}.md"


def parse(page: str) -> list[Block]:
  text, blocks = path_of(page).read_text(), []
  for match in BLOCK.finditer(text):
    before = text[: match.start("code")]
    section = re.findall(r"^## (.*)$", before, re.MULTILINE)[-1]
    line = before.count("\n") + 1
    kind, code, output = match.group("kind", "code", "output")
    blocks.append(
      Block(page, section, line, kind, code, output, match.span("output"))
    )
  return blocks


BLOCKS = [b for page in PAGES for b in parse(page)]
SECTIONS = list(dict.fromkeys((b.page, b.section) for b in BLOCKS))


def run(blocks: list[Block], folder: pathlib.Path) -> list[str]:
  """Returns what each block of a section prints."""
  (folder / "tests").mkdir()
  (folder / "tests" / "data").symlink_to(ROOT / "tests" / "data")
  (folder / "configs").symlink_to(ROOT / "configs")
  (folder / "bin").mkdir()
  for name, module in (("python", ""), ("vit-jax", "-m vit_jax")):
    program = folder / "bin" / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
    program.chmod(0o755)
  for block in BLOCKS:  # a section may use the module of another one
    if name := block.file:
      (folder / name).write_text(block.code)
  space, outputs = {"__name__": "__main__"}, []
  for block in blocks:
    if block.kind == "sh":
      command = ["bash", "-euo", "pipefail", "-c", block.code]
      outputs.append(_call(command, folder, PYTHONPATH=str(ROOT)))
    elif block.file:
      outputs.append("")
    elif block.code.startswith(ALONE):
      code = f"import sys; sys.modules['vit_jax'] = None\n{block.code}"
      outputs.append(_call(["python", "-c", code], folder))
    else:
      code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
      with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as text,
      ):
        exec(code, space)
      outputs.append(text.getvalue())
  return outputs


def _call(command: list[str], folder: pathlib.Path, **more: str) -> str:
  env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
  for name in ("XLA_FLAGS", "PYTHONPATH"):  # one device
    env.pop(name, None)
  env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
  out = subprocess.run(
    command, cwd=folder, env=env | more, capture_output=True, text=True
  )
  assert out.returncode == 0, f"{command}\n{out.stdout}{out.stderr}"
  return out.stdout


def run_apart(page: str, section: str, folder: pathlib.Path) -> list[str]:
  """Does what `run` does in a process of its own, which has one device."""
  command = [sys.executable, __file__, "--run", page, section, str(folder)]
  path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
  _call(command, folder, PYTHONPATH=path)
  return json.loads((folder / "outputs.json").read_text())


def _param(page, section):
  marks = [pytest.mark.nightly] if section in SLOW else []
  return pytest.param(page, section, marks=marks)


@pytest.mark.parametrize(
  ("page", "section"), [_param(page, section) for page, section in SECTIONS]
)
def test_code_prints_what_the_page_shows(page, section, tmp_path):
  for package in NEEDS.get(section, ()):
    pytest.importorskip(package)
  blocks = [b for b in BLOCKS if (b.page, b.section) == (page, section)]
  if section in SLOW:
    open_source("digits", "train")  # the first time it says that it makes them
    outputs = run_apart(page, section, tmp_path)
  else:
    outputs = run(blocks, tmp_path)
  for block, output in zip(blocks, outputs, strict=True):
    if block.output is not None:
      assert output == block.output, f"docs/{page}.md:{block.line}"


def test_generated_pages_are_up_to_date():
  """Each is written by the script in benchmarks/ that has its text here."""
  assert compute.PAGE.read_text() == compute.page()
  assert options.OPTIONS.read_text() == options.options()
  text = study_report.DOC.read_text()
  lines = study.read(study.RESULTS)
  assert text == study_report.with_tables(text, lines)


TEXTS = {
  path: path.read_text()
  for path in sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/notes/*.md")
    for path in ROOT.glob(pattern)
  )
}


def _prose(path: pathlib.Path) -> str:
  """Returns the text of a page without its blocks of code."""
  return re.sub(r"```.*?```", "", TEXTS[path], flags=re.DOTALL)


def _anchors(path: pathlib.Path) -> set[str]:
  """Returns the names of a page's headings in links, as GitHub makes them."""
  headings = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
  names = (re.sub(r"[^\w\- ]", "", h.strip().lower()) for h in headings)
  return {name.replace(" ", "-") for name in names}


def test_links_lead_somewhere():
  dead = []
  for page in TEXTS:
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
      path, _, name = link.partition("#")
      target = (page.parent / path).resolve() if path else page
      if "://" in link:
        continue
      if not target.exists() or (
        name and target in TEXTS and name not in _anchors(target)
      ):
        dead.append(f"{page.name}: {link}")
  assert not dead, "\n".join(dead)


def test_what_pages_name_exists():
  """Files, options, commands, config files, and targets of make."""
  rows = re.findall(r"^\| `([\w.]+)` \|", options.OPTIONS.read_text(), re.M)
  known = {row.removeprefix("evals.NAME.") for row in rows}
  known |= {row.split(".")[0] for row in rows}
  known |= {"json", "modle.variant"}  # config.json, and a misspelt option
  targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
  errors = []
  for page, text in TEXTS.items():

    def check(pattern, exists, page=page, text=text):
      names = {*re.findall(pattern, text, re.MULTILINE)}
      errors.extend(f"{page.name}: {n}" for n in names if not exists(n))

    if page.name != "coming_from.md":  # it names files of other projects
      path = r"`((?:vit_jax|tests|docs|configs|benchmarks)/[\w/]+\.\w+)`"
      check(path, lambda n: (ROOT / n).exists())
      check(r"`config\.([a-z_0-9.]*[a-z_0-9])`", lambda n: n in known)
    check(
      r"--config\.(?:evals\.\w+\.)?([a-z_0-9.]*[a-z_0-9])=",
      lambda n: n in known,
    )
    check(r"^(?:\$ )?vit-jax ([a-z]+)", lambda n: n in COMMANDS)
    check(
      r"vit-jax \w+ [^\n`]*--config=([a-z_0-9]+)[:\s`]",
      lambda n: n in config_files.known(),
    )
    check(r"(?:^|`)make ([\w-]+)(?:$|`)", lambda n: n in targets)
  assert not errors, "\n".join(errors)


def update(page: str) -> None:
  """Writes the outputs into the text."""
  text, blocks = path_of(page).read_text(), parse(page)
  outputs = []
  for section, _ in itertools.groupby(blocks, lambda b: b.section):
    with tempfile.TemporaryDirectory() as folder:
      outputs += run_apart(page, section, pathlib.Path(folder))
  for block, output in reversed(list(zip(blocks, outputs, strict=True))):
    if block.output is not None:
      start, end = block.span
      text = text[:start] + output + text[end:]
  path_of(page).write_text(text)


if __name__ == "__main__":
  if sys.argv[1:2] == ["--run"]:
    page, section, folder = sys.argv[2:]
    some = [b for b in BLOCKS if (b.page, b.section) == (page, section)]
    outputs = run(some, pathlib.Path(folder))
    pathlib.Path(folder, "outputs.json").write_text(json.dumps(outputs))
  else:
    for name in sys.argv[1:] or PAGES:
      update(name)

"""Runs the code of pages in docs/, and compares what comes out.

Blocks of a section run in order, in a folder of their own that has the
repository's tests/data. What a block prints must be the ```text block behind
it, if there is one. `python tests/test_docs.py [PAGE]` writes these anew.

A block that begins with "# Without vit_jax" runs in a process of its own, in
which that import fails; one that begins with "# NAME.py" is written to a file.
The other blocks run in the tests' own process, which has imported all they
need, and, every night and to write them, in processes of their own.
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

import pytest

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
  "Files, folders, globs, standard input",
  "Where the model looks",
  "Few-shot and linear probes",
  "StableHLO",
  "Hugging Face",
  *NEEDS,
)

BLOCK = re.compile(
  r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
  r"(?:\n```text\n(?P<output>.*?)^```\n)?",
  re.MULTILINE | re.DOTALL,
)

RUNNER = """
import contextlib, io, json, sys
todo = json.load(open(sys.argv[1]))
if todo["is_alone"]:
  sys.modules["vit_jax"] = None  # what makes an import fail
space, outputs = {"__name__": "__main__"}, []
for line, code in todo["blocks"]:
  with contextlib.redirect_stdout(io.StringIO()) as text:
    exec(compile("\\n" * (line - 1) + code, todo["page"], "exec"), space)
  outputs.append(text.getvalue())
loaded = [n for n in sys.modules if n.startswith("vit_jax.")]
assert not (todo["is_alone"] and loaded), loaded
json.dump(outputs, open(sys.argv[1], "w"))
"""


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

  @property
  def group(self) -> str:
    """Neighbours of the same group share a process."""
    if self.kind == "sh" or self.file:
      return f"{self.line}"
    return ALONE if self.code.startswith(ALONE) else "with"


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


def run(
  blocks: list[Block], folder: pathlib.Path, in_this_process: bool = False
) -> list[str]:
  """Returns what each block prints."""
  (folder / "tests").mkdir()
  (folder / "tests" / "data").symlink_to(ROOT / "tests" / "data")
  (folder / "configs").symlink_to(ROOT / "configs")
  (folder / "runner.py").write_text(RUNNER)
  (folder / "bin").mkdir()
  python = folder / "bin" / "python"
  python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  python.chmod(0o755)
  command = folder / "bin" / "vit-jax"
  command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vit_jax "$@"\n')
  command.chmod(0o755)
  for block in BLOCKS:  # a section may use the module of another one
    if name := block.file:
      (folder / name).write_text(block.code)
  outputs = []
  for group, some in itertools.groupby(blocks, lambda b: b.group):
    some = list(some)
    if some[0].kind == "sh":
      command = ["bash", "-euo", "pipefail", "-c", some[0].code]
      outputs.append(_call(command, folder))
    elif some[0].file:
      outputs.append("")
    elif in_this_process and group != ALONE:
      outputs += _run_here(some, folder)
    else:
      todo = folder / "todo.json"
      is_alone = group == ALONE
      rows = [(b.line, b.code) for b in some]
      page = f"docs/{some[0].page}.md"
      given = {"is_alone": is_alone, "blocks": rows, "page": page}
      todo.write_text(json.dumps(given))
      _call([sys.executable, "runner.py", "todo.json"], folder, is_alone)
      outputs += json.loads(todo.read_text())
  return outputs


def _run_here(blocks: list[Block], folder: pathlib.Path) -> list[str]:
  space, outputs = {"__name__": "__main__"}, []
  with contextlib.chdir(folder):
    for block in blocks:
      code = "\n" * (block.line - 1) + block.code
      with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(code, f"docs/{block.page}.md", "exec"), space)
      outputs.append(text.getvalue())
  return outputs


def _call(
  command: list[str], folder: pathlib.Path, is_alone: bool = False
) -> str:
  env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
  env.pop("XLA_FLAGS", None)  # one device
  env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
  path = env.pop("PYTHONPATH", "")
  if not is_alone:
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}"
  out = subprocess.run(
    command, cwd=folder, env=env, capture_output=True, text=True
  )
  assert out.returncode == 0, f"{command}\n{out.stdout}{out.stderr}"
  return out.stdout


BLOCKS = [b for page in PAGES for b in parse(page)]
SECTIONS = list(dict.fromkeys((b.page, b.section) for b in BLOCKS))


def check(page, section, folder, in_this_process):
  blocks = [b for b in BLOCKS if (b.page, b.section) == (page, section)]
  outputs = run(blocks, folder, in_this_process)
  for block, output in zip(blocks, outputs, strict=True):
    if block.output is not None:
      assert output == block.output, f"docs/{page}.md:{block.line}"


@pytest.mark.parametrize(
  ("page", "section"), [(p, s) for p, s in SECTIONS if s not in SLOW]
)
def test_code_does_what_the_text_says(page, section, tmp_path):
  check(page, section, tmp_path, in_this_process=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "section"), SECTIONS)
def test_code_does_what_the_text_says_in_a_process_of_its_own(
  page, section, tmp_path
):
  for package in NEEDS.get(section, ()):
    pytest.importorskip(package)
  open_source("digits", "train")  # the first time it says that it makes them
  check(page, section, tmp_path, in_this_process=False)


@pytest.mark.parametrize("page", PAGES)
def test_all_blocks_are_run(page):
  text, blocks = path_of(page).read_text(), parse(page)
  fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
  opened = fences[::2]
  assert set(fences[1::2]) == {""}  # every block is closed
  assert set(opened) <= {"python", "sh", "text"}
  assert opened.count("python") + opened.count("sh") == len(blocks)
  assert opened.count("text") == sum(b.output is not None for b in blocks)


def test_files_are_there():
  text = path_of("tour").read_text()
  paths = re.findall(r"`(vit_jax/[\w/.]+|tests/\w+\.py)`", text)
  assert len(paths) > 20
  assert all((ROOT / path).exists() for path in paths)


def test_the_parts_without_us_are_run_without_us(tmp_path):
  codes = [b.code for b in BLOCKS if b.code.startswith(ALONE)]
  assert len(codes) >= 4
  assert not any("vit_jax" in c.removeprefix(ALONE) for c in codes)
  code = f"{ALONE}.\nimport vit_jax\n"
  block = Block("weights", "", 7, "python", code, None, (0, 0))
  with pytest.raises(AssertionError, match='weights.md", line 8, in <module>'):
    run([block], tmp_path)


def update(page: str) -> None:
  """Writes the outputs into the text."""
  text, blocks = path_of(page).read_text(), parse(page)
  outputs = []
  for _, some in itertools.groupby(blocks, lambda b: b.section):
    with tempfile.TemporaryDirectory() as folder:
      outputs += run(list(some), pathlib.Path(folder))
  for block, output in reversed(list(zip(blocks, outputs, strict=True))):
    if block.output is not None:
      start, end = block.span
      text = text[:start] + output + text[end:]
  path_of(page).write_text(text)


if __name__ == "__main__":
  for name in sys.argv[1:] or PAGES:
    update(name)

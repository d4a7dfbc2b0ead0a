"""Runs the code of docs/weights.md, and compares what comes out.

Blocks of a section run in order, in a folder of their own that has the
repository's tests/data. What a block prints must be the ```text block behind
it, if there is one. `python tests/test_docs.py` writes these anew.

A block that begins with "# Without vit_jax" runs in a process of its own, in
which that import fails; one that begins with "# NAME.py" is written to a file.
The other blocks run in the tests' own process, which has imported all they
need, and, in the slow suite and to write them, in processes of their own.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "weights.md"
ALONE = "# Without vit_jax"
# Sections that start processes of their own.
SLOW = ("Convert", "Into other Flax code", "From other Flax code")

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
    exec(compile("\\n" * (line - 1) + code, "docs/weights.md", "exec"), space)
  outputs.append(text.getvalue())
loaded = [n for n in sys.modules if n.startswith("vit_jax.")]
assert not (todo["is_alone"] and loaded), loaded
json.dump(outputs, open(sys.argv[1], "w"))
"""


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of code; `line` is that of its first line of code."""

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


def parse(text: str) -> list[Block]:
  blocks = []
  for match in BLOCK.finditer(text):
    before = text[: match.start("code")]
    section = re.findall(r"^## (.*)$", before, re.MULTILINE)[-1]
    line = before.count("\n") + 1
    kind, code, output = match.group("kind", "code", "output")
    blocks.append(
      Block(section, line, kind, code, output, match.span("output"))
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
      todo.write_text(json.dumps({"is_alone": is_alone, "blocks": rows}))
      _call([sys.executable, "runner.py", "todo.json"], folder, is_alone)
      outputs += json.loads(todo.read_text())
  return outputs


def _run_here(blocks: list[Block], folder: pathlib.Path) -> list[str]:
  space, outputs = {"__name__": "__main__"}, []
  with contextlib.chdir(folder):
    for block in blocks:
      code = "\n" * (block.line - 1) + block.code
      with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(code, "docs/weights.md", "exec"), space)
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


BLOCKS = parse(DOC.read_text())
SECTIONS = list(dict.fromkeys(b.section for b in BLOCKS))


def check(section, folder, in_this_process):
  blocks = [b for b in BLOCKS if b.section == section]
  outputs = run(blocks, folder, in_this_process)
  for block, output in zip(blocks, outputs, strict=True):
    if block.output is not None:
      assert output == block.output, f"docs/weights.md:{block.line}"


@pytest.mark.parametrize("section", [s for s in SECTIONS if s not in SLOW])
def test_code_does_what_the_text_says(section, tmp_path):
  check(section, tmp_path, in_this_process=True)


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_code_does_what_the_text_says_in_a_process_of_its_own(
  section, tmp_path
):
  check(section, tmp_path, in_this_process=False)


def test_all_blocks_are_run():
  fences = re.findall(r"^```(\w*)$", DOC.read_text(), re.MULTILINE)
  opened = fences[::2]
  assert set(fences[1::2]) == {""}  # every block is closed
  assert set(opened) == {"python", "sh", "text"}
  assert opened.count("python") + opened.count("sh") == len(BLOCKS)
  assert opened.count("text") == sum(b.output is not None for b in BLOCKS)


def test_the_parts_without_us_are_run_without_us(tmp_path):
  codes = [b.code for b in BLOCKS if b.code.startswith(ALONE)]
  assert len(codes) >= 4
  assert not any("vit_jax" in c.removeprefix(ALONE) for c in codes)
  block = Block("", 7, "python", f"{ALONE}.\nimport vit_jax\n", None, (0, 0))
  with pytest.raises(AssertionError, match='weights.md", line 8, in <module>'):
    run([block], tmp_path)


def update() -> None:
  """Writes the outputs into the text."""
  text, blocks = DOC.read_text(), parse(DOC.read_text())
  outputs = []
  for _, some in itertools.groupby(blocks, lambda b: b.section):
    with tempfile.TemporaryDirectory() as folder:
      outputs += run(list(some), pathlib.Path(folder))
  for block, output in reversed(list(zip(blocks, outputs, strict=True))):
    if block.output is not None:
      start, end = block.span
      text = text[:start] + output + text[end:]
  DOC.write_text(text)


if __name__ == "__main__":
  update()

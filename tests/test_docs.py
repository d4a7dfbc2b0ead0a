"""Runs the commands of README and docs, and compares what they print.

The blocks of a page whose fence says `sh` or `python` run in their order, in
one folder. The blocks of Python share a process, but for those that begin with
"# Without vit_jax"; one that begins with "# NAME.py" is only written to that
file. A block of `text` that follows, after an empty line, is what the block
must print. Commands that are shown and not run have a fence that says `bash`.

What a user has at home (`STAND_INS`) is replaced by images of digits and small
files of weights. Training takes two steps, by options that are put behind those
of the page. `python tests/test_docs.py PAGE` writes the outputs into a page.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import api
import compute
import jax
import numpy as np
import options
import pytest
import study
import study_report
from PIL import Image

import vit_jax
from vit_jax import families, weights
from vit_jax.commands import COMMANDS
from vit_jax.config import config_files
from vit_jax.data.sources import open_source
from vit_jax.inference import pretrained
from vit_jax.models import build
from vit_jax.tools.exporting import convert

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALONE = "# Without vit_jax"
BLOCK = re.compile(
  r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S
)
TEXTS = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for pattern in ("*.md", "docs/**/*.md", "benchmarks/notes/*.md")
  for path in sorted(ROOT.glob(pattern))
}
# CONTRIBUTING.md: tests/test_examples.py.
PAGES = [p for p, t in TEXTS.items() if BLOCK.search(t) and p[0] != "C"]
SHORT = ("docs/weights.md",)  # the others take minutes
STAND_INS = {
  r"/path/to/(images|labelled)": "images",
  r"\*\.jpg": "*.png",
  r"(?<!/)ViT-B_16\.npz": "letters.npz",
  r"\bres=\d+": "res=32",
  r"\bresize\(\d+\)": "resize(32)",
}
TWO_STEPS = "--config.total_steps=2 --config.optim.warmup_steps=1"
TINY = (
  "--config.model.variant=Ti/16 --config.model.depth=1 --config.mesh.fsdp=1"
  " --config.data.batch_size=8"
)
MORE = {"docs/tasks/pretrain.md": TINY}  # for models too large for a test


def write_images(folder: pathlib.Path) -> None:
  """Writes the folders train and val with some digits of three classes."""
  from sklearn.datasets import load_digits

  digits = load_digits()
  for label in range(3):
    for split, some in (("train", slice(0, 30)), ("val", slice(30, 36))):
      (path := folder / f"{split}/{label}").mkdir(parents=True)
      for i, x in enumerate(digits.images[digits.target == label][some]):
        pixels = np.round(x * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((32, 32)).save(path / f"{i}.png")


def write_dinov3(folder: pathlib.Path) -> None:
  """Writes a tiny DINOv3 with random weights as transformers does."""
  model = families.model_config(
    "modern",
    variant="S/16",
    **dict(width=64, depth=2, mlp_dim=128, num_heads=4),
    **dict(registers=4, rope="dinov3", posemb="none", qkv_bias="no_key"),
    **dict(layer_scale=0.1, ln_eps=1e-5, gelu="erf"),
  )
  images = jax.numpy.zeros((1, 64, 64, 3))
  params = build(model, 0).init(jax.random.key(0), images)["params"]
  vit = pretrained.Pretrained(
    config=model,
    params=params,
    num_classes=0,
    image_size=(64, 64),
    class_names=None,
    ops="decode|resize_torch(64, 'bilinear')",
    loss="softmax",
    report=weights.Report("random", {}, {}, (), ()),
  )
  convert.convert(vit, str(folder), "hf")


def call(command: list[str], folder: pathlib.Path) -> str:
  """Returns what a command prints, on one device."""
  env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
  env.pop("XLA_FLAGS", None)
  env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
  env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
  out = subprocess.run(
    command, cwd=folder, env=env, capture_output=True, text=True
  )
  assert out.returncode == 0, f"{command}\n{out.stdout}{out.stderr}"
  return out.stdout


def run(page: str, folder: pathlib.Path) -> list[str]:
  """Returns the outputs of a page's blocks."""
  open_source("digits", "train")  # the first time it says that it makes them
  for name in ("configs", "docs", "tests/data"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(ROOT / name)
  (folder / "letters.npz").symlink_to(vit_jax.LETTERS)
  write_images(folder / "images")
  text = TEXTS[page]
  if "dinov3" in text:
    write_dinov3(folder / "dinov3")
  (folder / "bin").mkdir()
  more = f"{TWO_STEPS} {MORE.get(page, '')}"
  for name, program in (
    ("python", f'exec {sys.executable} "$@"\n'),
    (
      "vit-jax",
      f'case "$1" in train|sweep) set -- "$@" {more};; esac\n'
      f'exec {sys.executable} -m vit_jax "$@"\n',
    ),
  ):
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{program}")
    (folder / "bin" / name).chmod(0o755)
  if "runs/mine" in text and "--workdir=runs/mine" not in text:
    config = "folder:path=images,init=letters.npz,res=32"
    train = f"vit-jax train --config={config} --workdir=runs/mine"
    call(["bash", "-ec", train], folder)
  # The blocks of Python share a process, which has one device.
  call([sys.executable, __file__, "--run", page, str(folder)], folder)
  return json.loads((folder / "outputs.json").read_text())


def with_stand_ins(text: str) -> str:
  for pattern, value in STAND_INS.items():
    text = re.sub(pattern, value, text)
  return text


def blocks(page: str) -> list[tuple[str, str, str | None]]:
  """Returns kind, code and expected output of a page's blocks."""
  blocks = []
  for match in BLOCK.finditer(TEXTS[page]):
    kind, code, output = match.groups()
    filled = with_stand_ins(code)
    if output and filled != code:
      output = with_stand_ins(output)
    blocks.append((kind, filled, output))
  return blocks


def run_here(page: str, folder: pathlib.Path) -> None:
  """Writes the outputs of a page's blocks to outputs.json."""
  outputs, space = [], {"__name__": "__main__"}
  for i, (kind, code, _) in enumerate(blocks(page), 1):
    if kind == "sh":
      command = ["bash", "-euo", "pipefail", "-c", code]
      outputs.append(call(command, folder))
    elif name := re.match(r"# (\w+\.py)\n", code):
      (folder / name[1]).write_text(code)
      outputs.append("")
    elif code.startswith(ALONE):
      code = f"import sys; sys.modules['vit_jax'] = None\n{code}"
      outputs.append(call(["python", "-c", code], folder))
    else:
      with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as text,
      ):
        exec(compile(code, f"{page}, block {i}", "exec"), space)
      outputs.append(text.getvalue())
  (folder / "outputs.json").write_text(json.dumps(outputs))


def _mark(page: str):
  return pytest.mark.slow if page in SHORT else pytest.mark.nightly


@pytest.mark.parametrize(
  "page", [pytest.param(page, marks=_mark(page)) for page in PAGES]
)
def test_blocks_run_and_print_what_the_page_shows(page, tmp_path):
  for (_, code, expected), output in zip(
    blocks(page), run(page, tmp_path), strict=True
  ):
    assert expected is None or output == expected, code


def test_generated_pages_are_up_to_date():
  """Each is written by the script in benchmarks/ that has its text here."""
  assert compute.PAGE.read_text() == compute.page()
  assert options.OPTIONS.read_text() == options.options()
  assert api.PAGE.read_text() == api.page()
  text = study_report.DOC.read_text()
  lines = study.read(study.RESULTS)
  assert text == study_report.with_tables(text, lines)


def _outside_code(page: str) -> str:
  return re.sub(r"```.*?```", "", TEXTS[page], flags=re.S)


def _anchors(page: str) -> set[str]:
  """Returns the names of a page's headings in links, as GitHub makes them."""
  headings = re.findall(r"^#+ (.*)$", _outside_code(page), re.M)
  names = (re.sub(r"[^\w\- ]", "", h.strip().lower()) for h in headings)
  return {name.replace(" ", "-") for name in names}


def test_links_lead_somewhere():
  dead = []
  for page in TEXTS:
    for link in re.findall(r"\]\(([^)\s]+)\)", _outside_code(page)):
      if "://" in link:
        continue
      path, _, name = link.partition("#")
      target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
      other = target.relative_to(ROOT).as_posix()
      has_name = not name or other not in TEXTS or name in _anchors(other)
      if not (target.exists() and has_name):
        dead.append(f"{page}: {link}")
  assert not dead, "\n".join(dead)


def test_options_and_configs_in_commands_exist():
  """Also in blocks that do not run, and inside sentences."""
  rows = re.findall(r"^\| `([\w.]+)` \|", TEXTS["docs/options.md"], re.M)
  options = {row.removeprefix("evals.NAME.") for row in rows}
  options |= {row.split(".")[0] for row in rows} | {"modle.variant"}  # misspelt
  known = (
    (r"--config\.(?:evals\.\w+\.)?([a-z_0-9.]*[a-z_0-9])=", options),
    (r"^(?:\$ )?vit-jax ([a-z]+)", COMMANDS),
    (r"vit-jax \w+ [^\n`]*--config=([a-z_0-9]+)[:\s`]", config_files.known()),
  )
  wrong = [
    f"{page}: {name}"
    for page, text in TEXTS.items()
    for pattern, names in known
    for name in {*re.findall(pattern, text, re.M)} - {*names}
  ]
  assert not wrong, "\n".join(wrong)


def update(page: str) -> None:
  """Writes the outputs into the text; those with stand-ins stay."""
  with tempfile.TemporaryDirectory() as folder:
    outputs = iter(run(page, pathlib.Path(folder)))

  def with_output(match: re.Match) -> str:
    old, new, whole = match[3], next(outputs), match[0]
    if old is None or any(re.search(p, whole) for p in STAND_INS):
      return whole
    return whole.replace(f"```text\n{old}", f"```text\n{new}")

  (ROOT / page).write_text(BLOCK.sub(with_output, TEXTS[page]))


if __name__ == "__main__":
  if sys.argv[1:2] == ["--run"]:
    run_here(sys.argv[2], pathlib.Path(sys.argv[3]))
  else:
    for name in sys.argv[1:]:
      update(name)

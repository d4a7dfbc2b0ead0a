"""Where the commands of the documentation are parsed and run: a small world.

It has the folders and files that the pages name, each as small as can be: runs
of two steps, weights made of them, a few images, tars and tables.
"""

import ast
import functools
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
from unittest import mock

import numpy as np
from PIL import Image

from vit_jax.config import checks, cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vit_jax"
# Of the repository; copies, since some commands write into it.
COPIED = ("vit_jax", "configs", "tests", "benchmarks", "notebooks", "docs")
COPIED += ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
WEIGHTS = ("ViT-B_16.npz", "B_16.npz")
# One model for all: position embeddings and head are fitted anyway.
TINY = ("width=32", "depth=1", "mlp_dim=32", "num_heads=2")
TINY_STEM = ("stage_blocks=1,1,1", "stage_width=0.5")
TINY_RESNET = ("stage_blocks=1,1,1,1", "variant=R26x0.5")
SHORT = ("data.batch_size=8", "total_steps=2", "optim.warmup_steps=1")
EMBEDDED = ("digits", "folder:")
# Their commands have a config file, and may be run on fake data.
OF_CONFIGS = ("train", "evaluate", "sweep", "benchmark", "plan")


@functools.cache
def front(verb: str):
  """Returns the code of a command until its words are parsed, and its tree.

  That is before what is heavy is imported. A command that parses in its last
  lines has a function `parse`.
  """
  path = PACKAGE / f"{verb}.py"
  if not path.exists():
    path = PACKAGE / verb / "__main__.py"
  tree = ast.parse(path.read_text())
  ends = [
    i for i, node in enumerate(tree.body)
    if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
  ]  # fmt: skip
  body = tree.body[: ends[0] + 1]
  if ends[0] == len(tree.body) - 1:
    body[-1] = ast.parse("ARGS = parse()").body[0]
  return compile(ast.Module(body, []), str(path), "exec")


def parse(verb: str, words: list[str]) -> list[cli.Args]:
  """Parses words as `vit-jax VERB` does.

  Returns:
    What config files made of them, one for each task; nothing, of commands that
    have no config.

  Raises:
    SystemExit: As the command; with the faults of a config, too.
  """
  space = {"__name__": "__main__", "__file__": f"{verb}.py"}
  with mock.patch.object(sys, "argv", [f"vit-jax {verb}", *words]):
    exec(front(verb), space)
  args = space.get("ARGS", space.get("PARSED"))
  if isinstance(args, cli.Args):
    found = [args]
  elif isinstance(args, dict):
    found = [a for _, _, a in args.values()]
  else:
    found = []
  told = [f for a in found for f in a.faults]
  if verb != "evaluate":  # which would need the run itself
    told += [f for a in found for f in checks.faults(a.config)]
  if faults := list(dict.fromkeys(told)):
    raise SystemExit("\n".join(faults))
  return found


def appended(verb: str, words: list[str]) -> list[str]:
  """Returns what makes a command small, without what its words say already."""
  if verb == "score" and not any("digits" in w for w in words):
    fewer = ["--steps=gelu"] if "--explain" in words else []
    return ["--fake_data", "--batch_size=8", *fewer]
  if verb == "prepare":
    return ["--data_dir=tfds"]
  if verb == "serve":
    return ["--port=0"]
  if verb not in OF_CONFIGS or any(w.startswith("--help") for w in words):
    return []
  config = parse(verb, words)[0].config
  new, is_new = [], verb != "evaluate" or any("--config=" in w for w in words)
  if is_new:
    is_resnet = config.model.name.startswith("bit")
    options = TINY_RESNET if is_resnet else TINY
    if not is_resnet and config.model.variant.startswith("R"):
      options += TINY_STEM
    new += [f"--config.model.{option}" for option in options]
    new += [f"--config.{SHORT[0]}"]
  if is_new and verb != "evaluate":
    new += [f"--config.{option}" for option in SHORT[1:]]
    new += ["--config.model.dtype=float32"]
  if verb == "sweep":
    new += ["--grid=optim.lr=0.01"]
  if verb == "benchmark":
    new += ["--steps=2"]
  elif not config.data.dataset.startswith(EMBEDDED):
    new += ["--fake_data"]
  given = {w.partition("=")[0] for w in words}
  return [w for w in new if w.partition("=")[0] not in given]


def fill(folder: pathlib.Path) -> None:
  """Makes the files, without runs and weights."""
  for name in COPIED:
    if (ROOT / name).is_dir():
      no_bytecode = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / name, folder / name, ignore=no_bytecode)
    else:
      shutil.copy(ROOT / name, folder / name)
  (folder / "bin").mkdir()
  for name, module in (("vit-jax", "-m vit_jax"), ("python", "")):
    file = folder / "bin" / name
    small = " $APPENDED" if module else ""
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"{small}\n')
    file.chmod(0o755)
  _write_images(folder)
  for name in WEIGHTS:  # enough to read a model from; see `Session`
    shutil.copy(
      ROOT / "tests" / "data" / "vit_token.weights.npz", folder / name
    )


def _write_images(folder: pathlib.Path) -> None:
  from sklearn import datasets

  digits = datasets.load_digits()
  order = np.argsort(digits.target, kind="stable")
  pictures = {}
  for label in range(10):
    for row in order[digits.target[order] == label][:30]:
      pixels = np.kron(digits.images[row] * 15, np.ones((4, 4))).astype("uint8")
      file = io.BytesIO()
      Image.fromarray(pixels).convert("RGB").save(file, "png")
      pictures[f"{row:04}"] = label, file.getvalue()
  for name, (label, data) in pictures.items():
    path = folder / "scans" / str(label) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  (folder / "images").symlink_to("scans")
  for name in ("photos", "more/of", "shards", "tables"):
    (folder / name).mkdir(parents=True)
  for name, (_, data) in itertools.islice(pictures.items(), 0, 300, 75):
    image = Image.open(io.BytesIO(data)).resize((64, 48))
    for file in (f"photos/{name}.jpg", f"more/of/{name}.jpg"):
      image.save(folder / file)
  for file in ("photos/cat.jpg", "cat.jpg"):
    image.save(folder / file)
  for i, split in enumerate(("train", "test")):
    some = dict(itertools.islice(pictures.items(), i, None, 10))
    _write_tar(folder / "shards" / f"digits-{split}-0000.tar", some)
    _write_table(folder / "tables" / f"{split}-0000.parquet", some)


def _write_tar(path: pathlib.Path, pictures: dict) -> None:
  with tarfile.open(path, "w") as tar:
    for name, (label, data) in pictures.items():
      for suffix, text in (("png", data), ("cls", str(label).encode())):
        member = tarfile.TarInfo(f"{name}.{suffix}")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))


def _write_table(path: pathlib.Path, pictures: dict) -> None:
  import pyarrow
  from pyarrow import parquet

  images = [{"bytes": data, "path": None} for _, data in pictures.values()]
  labels = [label for label, _ in pictures.values()]
  table = pyarrow.table({"image": images, "label": labels})
  parquet.write_table(table, path)


def write_runs(folder: pathlib.Path) -> None:
  """Writes config.json of the runs that pages name, which parsers read."""
  from vit_jax.config import to_dict

  sources = {
    "runs/demo/pretrain": "glyphs",
    "runs/demo/finetune": "digits_finetune",
    "runs/vit_b16": "vit_b16:imagenet2012",
  }
  for run, source in sources.items():
    config = parse("train", [f"--config={source}"])[0].config
    path = folder / run / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_dict(config)))


# What answers with [status, what it printed] to each list of words.
SERVER = """
import contextlib, io, json, os, sys, traceback, warnings
warnings.filterwarnings("ignore", module="runpy")  # modules are run again
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vit_jax import __main__ as command
for line in sys.stdin:
  text, status = io.TextIOWrapper(io.BytesIO(), "utf-8"), 0
  with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
    try:
      command.run(json.loads(line))
    except SystemExit as e:
      status = e.code if isinstance(e.code, int) else int(bool(e.code))
      if isinstance(e.code, str):
        print(e.code)
    except BaseException:
      traceback.print_exc()
      status = 1
  text.flush()
  printed = text.buffer.getvalue().decode()
  print(json.dumps([status, printed]), file=answers, flush=True)
"""


class Session:
  """Runs commands in a folder, all of ours in one process, one by one.

  A process for each would take most of the time for its imports.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._process = None
    self._replaced: set[str] = set()
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if "device_count" not in f]  # one device
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    self.env = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": " ".join(flags),
      "PATH": path,
      "PYTHONPATH": str(folder),
      "COLUMNS": "80",
    }

  def ours(self, *words: str) -> tuple[int, str]:
    """Returns the status of `vit-jax WORDS`, and what it printed."""
    if self._process is None:
      self._process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(self.folder / "log.txt", "a"),
        text=True,
        cwd=self.folder,
        env=self.env,
      )
    self._process.stdin.write(json.dumps(words) + "\n")
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:  # it ended
      self.close()
      return 1, (self.folder / "log.txt").read_text()[-2000:]
    return tuple(json.loads(answer))

  def shell(self, text: str, small: list[str]) -> tuple[int, str]:
    """Returns the status of a shell command, and what it printed."""
    done = subprocess.run(
      ["bash", "-euo", "pipefail", "-c", text],
      cwd=self.folder,
      env={**self.env, "APPENDED": " ".join(small)},
      capture_output=True,
      text=True,
    )
    return done.returncode, done.stdout + done.stderr

  def make_runs(self) -> None:
    """Trains, two steps each, the runs that pages name, and their weights."""
    for run in ("runs/vit_b16", "runs/demo/pretrain", "runs/demo/finetune"):
      source = "digits_finetune"
      if "finetune" in run:
        source += ":init=runs/demo/pretrain"
      elif "b16" in run:
        source = "vit_b16:imagenet2012"
      words = [f"--config={source}", f"--workdir={run}"]
      if "pretrain" in run:
        names = ("data", "evals.digits", "evals.val")
        words += [f"--config.{name}.ops=decode|resize(32)" for name in names]
      self.check("train", *words, *appended("train", words))
    shutil.copytree(self.folder / "runs", self.folder / "kept" / "runs")
    self.check("convert", "runs/vit_b16", "made.npz", "--to=npz")
    with np.load(self.folder / "made.npz") as arrays:
      named = dict(arrays)
    (self.folder / "made.npz").unlink()
    np.savez(self.folder / WEIGHTS[0], **named)
    # AugReg's have no layer before the head.
    named = {k: v for k, v in named.items() if "pre_logits" not in k}
    np.savez(self.folder / WEIGHTS[1], **named)

  def check(self, *words: str) -> str:
    status, text = self.ours(*words)
    assert status == 0, f"vit-jax {' '.join(words)}\n{text}"
    return text

  def make_ready(self, verb: str, words: list[str]) -> None:
    """Makes runs that a command reads, and removes what it makes."""
    options = dict(w.lstrip("-").partition("=")[::2] for w in words)
    kept = self.folder / "kept"
    made = options.get("workdir")
    if verb in ("train", "sweep") and "config" in options:
      name = pathlib.PurePath(options["config"].partition(":")[0]).stem
      made = made or f"runs/{name}" + "_sweep" * (verb == "sweep")
      self._remove(made)
    if verb == "prepare" and "name" in options:
      self._remove(f"tfds/{options['name']}")
    if verb == "convert":
      made = words[1]
    for word in words:
      for name in word.replace(",", "=").replace(":", "=").split("="):
        path = self.folder / name
        if name.startswith("runs/") and name != made and not path.exists():
          is_small = not re.search(r"vit_|b16|vtab|cifar", name)
          like = "runs/demo/finetune" if is_small else "runs/vit_b16"
          source = kept / name
          source = source if source.exists() else kept / like
          shutil.copytree(source, path)
    if made and (kept / made).exists():  # what is made is not what was kept
      self._replaced.add(made)

  def restore(self) -> None:
    """Puts back the runs that a command has written anew."""
    for name in self._replaced:
      self._remove(name)
      shutil.copytree(self.folder / "kept" / name, self.folder / name)
    self._replaced.clear()

  def _remove(self, name: str) -> None:
    shutil.rmtree(self.folder / name, ignore_errors=True)

  def close(self) -> None:
    if self._process:
      self._process.stdin.close()
      self._process.wait()
      self._process = None

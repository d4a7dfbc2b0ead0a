"""Commands of README, CONTRIBUTING and docs are parsed, and run if possible.

`doc_commands` finds them, `doc_sandbox` has the files that they name. In the
quick tests the parser of the command reads its words, and its config is built.
With the slow tests README's commands run, and every night the others: as they
are written, with words behind them that make the model small, the run short and
the data fake. What is not run here is in `NOT_RUN`, with the reason.
"""

import contextlib
import dataclasses
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import doc_commands
import doc_sandbox
import pytest
import test_adding
import test_docs
import test_tasks
from doc_commands import Command, of_this_project, simple

from vit_jax.config.commands import COMMANDS

ROOT = doc_commands.ROOT
ALL, UNKNOWN = doc_commands.every()

THEIRS = r"python -m (vit_jax\.main|big_vision|timm)"  # of other projects
# A command that matches is not run here -> why.
NOT_RUN = {
  THEIRS: "a command of another project",
  r"\bgcloud\b|\bgsutil\b": "needs an account of Google Cloud",
  r"\bsbatch\b|#SBATCH|\bsrun\b": "needs a cluster with SLURM",
  r"--coordinator": "needs several machines: see tests/runtime",
  r"^(git clone|cd |source |export |sbatch)": "of the reader's own shell",
  r"^(sudo |apt |docker |ssh |curl |wget )": "changes the machine, downloads",
  r"\bpip |\buv |-m venv": "downloads; CI does, see make test-wheel",
  r"^make |^\.ci/run": "CI runs it",
  r"\bjupyter lab\b": "opens a page: see test_notebook.py",
  r"\bpytest\b|test_configs\.py|\bruff\b": "a part of the tests themselves",
  r"vit.jax.plan\b": "needs the TPU's compiler: see test_plan.py",
  r"prepare (cifar10|imagenet|\$set)": "downloads, or reads tars of ImageNet:"
  " see tests/commands/test_prepare_source.py",
  r"prepare hf:": "downloads: see tests/data/test_imports.py",
  r"benchmarks/(\w+_speed|input|cpu_step|plans|study)\.py": "takes minutes",
  r"benchmarks/gpu\.sh": "needs a GPU: see tests/test_gpu_script.py",
  r"receipts\.py NAME RUN": "writes a number: see test_receipts.py",
  r"hf-hub:|gs://|--push": "needs the network: see tests/weights",
}
# What the words of a page's placeholders lack, in code spans alone, where a
# part of a command may stand for it.
LACKING = {
  **dict.fromkeys(doc_sandbox.OF_CONFIGS, ["--config=vit_b16:imagenet2012"]),
  "evaluate": ["--checkpoint=runs/vit_b16"],
  "predict": ["ViT-B_16.npz", "photos"],
  "visualize": ["ViT-B_16.npz", "--out=written"],
  "score": ["ViT-B_16.npz"],
  "serve": ["ViT-B_16.npz"],
  "convert": ["runs/vit_b16", "written.npz", "--to=npz"],
  "report": ["runs/demo/finetune"],
  "prepare": ["cifar10"],
}
# What takes minutes -> what takes seconds.
FEWER = {
  r"task=all": "task=dtd",  # of 19 tasks, each a search of its own
  r"batch_size=256": "batch_size=8",
  r"(verify \S+) 5000": r"\1 2",  # the last step of the small run
  r",res=\d+": "",
  r"(--config=\S*(?:finetune|vtab)(?:\.py)?:\S*model=[^,\s]+)": r"\1,res=64",
}
LABEL = re.compile(r"^([a-z][\w-]*) {2,}", re.MULTILINE)


def _run_elsewhere() -> set[str]:
  """Returns the places of commands in blocks that other tests run."""
  found = set()
  for block in test_docs.BLOCKS:
    page = test_docs.path_of(block.page).relative_to(ROOT)
    lines = block.code.count("\n")
    found |= {f"{page}:{block.line + i}" for i in range(lines)}
  for page in test_tasks.PAGES:
    if page.stem not in test_tasks.WITHOUT_SCRIPT:
      some = [b for b in doc_commands.blocks(page) if b.kind == "sh"]
      for b in some:
        found |= {f"{b.page}:{b.line + i}" for i in range(len(b.lines))}
  text = test_adding.PAGE
  for recipe in test_adding.RECIPES.values():
    for match in test_adding.BLOCK.finditer(recipe):
      at = text.index(match[0])
      start = text.count("\n", 0, at) + 2
      lines = match[2].count("\n")
      found |= {f"CONTRIBUTING.md:{start + i}" for i in range(lines)}
  return found


ELSEWHERE = _run_elsewhere()


def _is_mention(verb: str, words: list[str], command: Command) -> bool:
  """Names a command, as in `vit-jax train`, without the rest of it."""
  return command.is_inline and not words and verb != "models"


def _completed(command: Command) -> list[tuple[str, list[str]]]:
  """Returns (verb, words) of each of our commands, with what spans lack."""
  found = []
  for verb, *words in of_this_project(command.filled):
    if re.search(THEIRS, command.text):
      continue
    if _is_mention(verb, words, command):
      continue
    lacking = LACKING.get(verb, [])
    options = {w.partition("=")[0] for w in words}
    if verb in doc_sandbox.OF_CONFIGS:
      is_part = not options & {"--config", "--checkpoint", "--help", "-h"}
    else:
      is_part = words[:1] and words[0].startswith("-")
    if command.is_inline and is_part and "--help" not in options:
      words += lacking
    found.append((verb, words))
  return found


OURS = {
  command.text: command for command in reversed(ALL) if _completed(command)
}
OURS = dict(reversed(OURS.items()))


def _refusals() -> dict[str, str]:
  """Returns the commands whose shown output is that of a refusal."""
  return {
    c.text: c.output
    for c in ALL
    if re.match(r"\d+ faults? in |--config", c.output)
  }


def test_every_line_of_a_block_is_known():
  assert not UNKNOWN, "\n".join(UNKNOWN)
  assert len(ALL) > 100 and len(OURS) > 50
  pages = {command.page for command in ALL}
  assert {"README.md", "CONTRIBUTING.md", "docs/train.md"} <= pages


@pytest.mark.parametrize(
  ("lines", "texts", "faults"),
  [
    (["vit-jax models", "", "# then", "ls \\", "  a"], 2, 0),
    (["$ ls", "a", "$ ls \\", "b", "c"], 2, 0),
    (["git clone <this repository> a && cd a"], 1, 0),
    (["A=b C=d", "export E=f", "ls $A"], 1, 0),
    (["for a in b c; do ls $a; done"], 1, 0),
    (["A=b .venv/bin/anything 'c", "d'"], 1, 0),
    (["#!/bin/bash", "cd $X", "srun y"], 1, 0),
    (["vit-jax models", "model  parameters"], 1, 1),
    (["newprogram --flag"], 0, 1),
    (["a", "$ ls"], 1, 1),
    (["ls 'a"], 0, 1),
  ],
)
def test_what_is_a_command(lines, texts, faults):
  block = doc_commands.Block("page", 1, "", tuple(lines))
  found, unknown = doc_commands.commands(block)
  assert (len(found), len(unknown)) == (texts, faults)


def test_variables_of_a_block_are_known():
  block = doc_commands.Block("page", 1, "", ("A=b", "ls $A ${A} $AB /path"))
  ((command,), _) = doc_commands.commands(block)
  assert command.filled == "ls b b $AB images"


def test_words_of_a_shell_text():
  assert simple("A=1 a 'b|c' \\\n d | e > f 2>&1 && g # h\nj") == [
    ["a", "b|c", "d"], ["e"], ["g"], ["j"],
  ]  # fmt: skip
  text = 'gcloud x --command="cd y &&\n .venv/bin/vit-jax train \\\n  --a=$B"'
  assert of_this_project(text) == [["train", "--a=$B"]]
  text = "srun --x .venv/bin/python -m vit_jax plan --a"
  assert of_this_project(text) == [["plan", "--a"]]
  assert of_this_project("vit-jax models | head") == [["models"]]
  text = "for a in b c; do vit-jax models $a; done"
  assert of_this_project(text) == [["models", "$a"]]
  assert not of_this_project("python -m pytest vit-jax")


def test_a_shell_can_read_all():
  """`bash -n` of each, as a function, so that an error has its line."""
  texts = [doc_commands.BLANK.sub("BLANK", c.text) for c in ALL]
  for command, text in zip(ALL, texts, strict=True):
    assert "\n}\n" not in text, command.place
  whole = "".join(f"f{i}() {{\n{text}\n}}\n" for i, text in enumerate(texts))
  done = subprocess.run(
    ["bash", "-n"], input=whole, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def test_verbs_exist():
  for command in ALL:
    if not re.search(THEIRS, command.text):
      for verb, *_ in of_this_project(command.text):
        is_known = verb in (*COMMANDS, "VERB", "--help", "--version")
        assert is_known, f"{command.place}: {verb}"


def test_files_of_other_commands_exist():
  """Targets of make, scripts, requirements, extras, what is copied."""
  targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
  for command in ALL:
    if re.search(THEIRS, command.text):
      continue
    for program, *words in simple(command.text):
      if program == "make":
        named = [w for w in words if "=" not in w and not w.startswith("-")]
        assert set(named) <= set(targets), command.place
      for word in (program, *words):
        extras = re.fullmatch(r"(?:\.|vit_jax)\[([\w,]+)\]", word)
        for extra in extras[1].split(",") if extras else ():
          if extra == "NAME":  # any
            continue
          assert (ROOT / f"requirements-{extra}.txt").exists(), command.place
        if re.match(r"(tests|benchmarks|configs)/|requirements\S*\.txt$", word):
          path, *_ = word.split(":")
          assert (ROOT / path).exists(), f"{command.place}: {path}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """What parsers read."""
  folder = tmp_path_factory.mktemp("read")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    doc_sandbox.fill(folder)
    doc_sandbox.write_runs(folder)
    yield folder


@pytest.mark.parametrize("text", OURS, ids=[c.place for c in OURS.values()])
def test_words_are_those_of_the_command(text, files, monkeypatch):
  monkeypatch.chdir(files)
  refused = _refusals()
  for verb, words in _completed(OURS[text]):
    for word in words:  # those that an earlier command of the page makes
      for run in re.findall(r"\bruns/[\w/]+", word):
        if not (files / run).exists():
          shutil.copytree(files / "runs/demo/finetune", files / run)
    try:
      doc_sandbox.parse(verb, words)
    except SystemExit as e:
      if text in refused:
        shown = re.findall(r"^  - (.*)$", refused[text], re.MULTILINE)
        assert e.code.splitlines() == shown
      else:
        assert not e.code, f"{OURS[text].place}: vit-jax {verb} {words}"
    else:
      assert text not in refused, "is not refused"


@pytest.mark.parametrize("word", ["--config.modle.depth=1", "--wrkdir=x", "b"])
def test_a_wrong_word_is_found(word, files, monkeypatch):
  monkeypatch.chdir(files)
  with pytest.raises(SystemExit) as e:
    doc_sandbox.parse("train", ["--config=vit_b16", word])
  assert e.value.code
  with pytest.raises(SystemExit) as e:
    doc_sandbox.parse("report", ["--otu=x"])
  assert e.value.code


def _matches(pattern: str, command: Command) -> bool:
  texts = command.text, command.filled
  return any(re.search(pattern, text, re.MULTILINE) for text in texts)


def _reason(command: Command) -> str:
  """Returns why a command is not run here, or ""."""
  if command.place in ELSEWHERE:
    return "run by test_docs.py, test_tasks.py or test_adding.py"
  for pattern, reason in NOT_RUN.items():
    if _matches(pattern, command):
      return reason
  is_ours = bool(of_this_project(command.text))
  return "only named" if is_ours and not _completed(command) else ""


RUN = list(dict.fromkeys(c.text for c in ALL if not _reason(c)))
WHERE = {c.text: c for c in reversed(ALL) if not _reason(c)}


def test_every_reason_has_a_command():
  """A reason without a command would hide one that comes later."""
  unused = [
    pattern
    for pattern in NOT_RUN
    if not any(_matches(pattern, command) for command in ALL)
  ]
  assert not unused
  assert len(RUN) > 40


@pytest.mark.parametrize(
  "command",
  [
    pytest.param(c, id=f"{c.place} {_reason(c)}")
    for c in ALL
    if _reason(c) and c.text not in WHERE
  ],
)
@pytest.mark.nightly
def test_not_run(command):
  """Lists what is not run, with the reasons."""
  pytest.skip(f"{command.text}: {_reason(command)}")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    doc_sandbox.fill(folder)
    session = doc_sandbox.Session(folder)
    session.make_runs()
    yield session
    session.close()


def _mark(place: str):
  """What README shows is run with the slow tests, the rest every night."""
  is_readme = place.startswith("README")
  return pytest.mark.slow if is_readme else pytest.mark.nightly


@pytest.mark.parametrize(
  "text",
  [
    pytest.param(t, id=WHERE[t].place, marks=_mark(WHERE[t].place)) for t in RUN
  ],
)
def test_runs(text, session, monkeypatch):
  monkeypatch.chdir(session.folder)  # where configs look for their files
  session.restore()
  command = WHERE[text]
  code = command.filled
  for pattern, new in FEWER.items():
    code = re.sub(pattern, new, code)
  ours = _completed(dataclasses.replace(command, text=code, given=()))
  is_refused = text in _refusals()
  small = []
  for verb, words in ours:
    session.make_ready(verb, words)
    small = [] if is_refused else doc_sandbox.appended(verb, words)
  if ours and ours[0][0] == "serve":
    _serve(session, ours[0][1])
    return
  is_plain = not re.match(r"[A-Z_]+=|.*[^'\w](\w*/)*\*", code)
  if is_plain and len(ours) == len(simple(code)) == 1:
    ((verb, words),) = ours
    status, printed = session.ours(verb, *words, *small)
  else:
    code = code.replace(".venv/bin/", "").replace("python3 ", "python ")
    status, printed = session.shell(code, small)
  if "expected installed packages" in printed:
    pytest.skip(printed)
  assert (status != 0) == is_refused, printed[-3000:]
  if is_refused or ours and ours[0][0] == "models":
    _assert_lines_are_printed(command, printed)
  missing = set(LABEL.findall(command.output)) - set(LABEL.findall(printed))
  assert not missing, f"no line {missing} in\n{printed}"


def _assert_lines_are_printed(command: Command, printed: str) -> None:
  lines = [" ".join(line.split()) for line in printed.splitlines()]
  for line in command.output.splitlines():
    if line.strip() not in ("", "..."):
      assert " ".join(line.split()) in lines, line


def _serve(session, words: list[str]) -> None:
  """The page opens; the command ends when it is interrupted."""
  pytest.importorskip("uvicorn")
  process = subprocess.Popen(
    ["vit-jax", "serve", *words, "--port=0"],
    cwd=session.folder,
    env=session.env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    lines = []
    for line in process.stdout:
      lines.append(line)
      if found := re.search(r"http://[\w.:]+", line):
        break
    else:
      pytest.fail("".join(lines))
    for _ in range(60):
      with contextlib.suppress(urllib.error.URLError):  # not yet
        with urllib.request.urlopen(found[0]) as page:
          assert page.status == 200
          break
      time.sleep(1)
    else:
      pytest.fail(f"no answer from {found[0]}")
  finally:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

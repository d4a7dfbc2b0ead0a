"""The commands of README, CONTRIBUTING and docs: found, taken apart, filled.

Commands are in fenced blocks and in `code spans`. A block is of one kind:

- a transcript: lines behind "$ " are commands, the others what they print;
- a script, which begins with "#!";
- a list of commands, which begins with one (or with "# a comment");
- ```text without "$ ", what a program prints (of a help text, the examples are
  commands); ```python and ```diff.

Anything else is a fault, so that no command is missed.
"""

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SHELL = ("", "sh", "bash", "console")
CODE = ("python", "diff", "json", "html")
# What a line of commands may begin with, behind "NAME=value", and whatever is
# in a .venv/bin.
PROGRAMS = set(
  "vit-jax python python3 python3.11 python3.12 pip uv uvx make git cd cp mv rm"
  " ls mkdir cat head tail export source . gcloud gsutil sbatch srun ssh curl"
  " wget find tar echo docker jupyter tensorboard pytest ruff kill sudo apt"
  " bash sh env nohup unset chromium open xargs grep for".split()
) | {".ci/run"}
FENCE = re.compile(r"^(?P<indent> *)```+(?P<kind>[\w+-]*) *$")
# What --help says above its examples.
EXAMPLES = re.compile(r"examples?:$")
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
# <this repository>: what the reader has to put in.
BLANK = re.compile(r"<[a-z][\w ]*>")


@dataclasses.dataclass(frozen=True)
class Command:
  """One command of a page.

  text: As it is written, with its continuation lines, without "$ ". Lines that
    only set variables are none; see `given`.
  output: The lines below it in a transcript, or the ```text block behind its
    block; "" if none.
  is_inline: It is a code span of the running text.
  given: Variables of the shell that lines above it in its block set.
  """

  page: str
  line: int
  text: str
  output: str = ""
  is_inline: bool = False
  given: tuple[tuple[str, str], ...] = ()

  @property
  def place(self) -> str:
    return f"{self.page}:{self.line}"

  @property
  def filled(self) -> str:
    """The text with the variables that are set, and the reader's own names."""
    text = self.text
    for name, value in self.given:
      text = re.sub(rf"\$({name}\b|{{{name}}})", lambda _, v=value: v, text)
    for pattern, new in FILLED.items():
      text = re.sub(pattern, new, text)
    return text


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block; `line` is that of its first line."""

  page: str
  line: int
  kind: str
  lines: tuple[str, ...]


def blocks(page: pathlib.Path) -> list[Block]:
  """Returns the fenced blocks of a page."""
  name, found, opened = str(page.relative_to(ROOT)), [], None
  for number, line in enumerate(page.read_text().splitlines(), 1):
    match = FENCE.match(line)
    if opened is None:
      assert match or "```" not in line, f"{name}:{number}: {line}"
      if match:
        opened, lines = (number + 1, match["kind"], len(match["indent"])), []
    elif match:
      assert not match["kind"], f"{name}:{number}: a block in a block"
      found.append(Block(name, opened[0], opened[1], tuple(lines)))
      opened = None
    else:
      lines.append(line[opened[2] :])
  assert opened is None, f"{name}:{opened[0]}: the block is not closed"
  return found


def begins_command(line: str) -> bool:
  words = line.split()
  while words and ASSIGNED.match(words[0]):
    words.pop(0)
  if not words:
    return bool(ASSIGNED.match(line))
  return words[0] in PROGRAMS or ".venv" in words[0].split("/")


def commands(block: Block) -> tuple[list[Command], list[str]]:
  """Returns the commands of a block, and its lines that are of no kind."""
  lines = block.lines
  is_transcript = any(line.startswith("$ ") for line in lines)
  if block.kind == "text" and any(EXAMPLES.match(line) for line in lines):
    return _examples(block), []
  if block.kind in CODE or (block.kind == "text" and not is_transcript):
    return [], [
      f"{block.page}:{block.line + i}: {line!r} is a command in a block of"
      f" {block.kind}"
      for i, line in enumerate(lines)
      if block.kind == "text" and re.match(r"vit-jax [a-z]+ ", line)
    ]
  if block.kind not in (*SHELL, "text"):
    return [], [f"{block.page}:{block.line}: a block of {block.kind!r}"]
  if lines and lines[0].startswith("#!"):
    return [Command(block.page, block.line, "\n".join(lines))], []
  found, faults, number, given = [], [], 0, {}
  while number < len(lines):
    first, line = number, lines[number]
    number += 1
    if is_transcript and not line.startswith("$ "):
      if found:
        before = found[-1]
        output = f"{before.output}{line}\n"
        found[-1] = dataclasses.replace(before, output=output)
      elif line.strip():
        faults.append(f"{block.page}:{block.line + first}: {line!r} is first")
      continue
    if not is_transcript and (not line.strip() or line.startswith("#")):
      continue
    text = line.removeprefix("$ ") if is_transcript else line
    if not begins_command(text):
      faults.append(f"{block.page}:{block.line + first}: {line!r}")
      continue
    while number < len(lines) and _goes_on(text):
      text += "\n" + lines[number].removeprefix("> ")
      number += 1
    if _goes_on(text):
      faults.append(f"{block.page}:{block.line + first}: does not end")
      continue
    set_here = _assignments(text)
    if set_here is None:
      place = block.page, block.line + first
      found.append(Command(*place, text, given=tuple(given.items())))
    given |= set_here or {}
  return found, faults


def _assignments(text: str) -> dict[str, str] | None:
  """Returns the variables that a line sets; None if it does other things."""
  words = shlex.split(_bare(text), comments=True)
  words = words[1:] if words[0] == "export" else words
  if not all(ASSIGNED.match(word) for word in words):
    return None
  return {k: v for k, _, v in (word.partition("=") for word in words)}


def _examples(block: Block) -> list[Command]:
  """Returns the commands that end what --help prints."""
  at = next(i for i, x in enumerate(block.lines) if EXAMPLES.match(x)) + 1
  lines = [x.removeprefix("  ") for x in block.lines[at:]]
  listed = Block(block.page, block.line + at, "sh", tuple(lines))
  found, faults = commands(listed)
  assert not faults, faults
  return found


def _goes_on(text: str) -> bool:
  """Ends with a backslash or "&&", or in a quotation or here document."""
  if text.endswith(("\\", "&&", "|", "||")):
    return True
  document = re.search(r"<<-? *['\"]?(\w+)", text)
  if document:
    return document[1] not in text.splitlines()[1:]
  try:
    shlex.split(_bare(text), comments=True)
  except ValueError:
    return True
  return False


def inline(page: pathlib.Path) -> list[Command]:
  """Returns the code spans that are commands with at least one word."""
  name, text = str(page.relative_to(ROOT)), page.read_text()
  text = re.sub(
    r"^( *)```.*?^ *```$",
    lambda m: "\n" * m[0].count("\n"),
    text,
    flags=re.MULTILINE | re.DOTALL,
  )
  found = []
  for match in re.finditer(r"(`+)([^`]+)\1", text):
    if "\n\n" in match[2]:
      continue
    code = " ".join(match[2].split()).replace("\\|", "|")
    if begins_command(code) and " " in code:
      line = text.count("\n", 0, match.start()) + 1
      found.append(Command(name, line, code, is_inline=True))
  return found


def every() -> tuple[list[Command], list[str]]:
  """Returns the commands of all pages in their order, and what is no kind."""
  found, faults = [], []
  for page in PAGES:
    before: list[Command] = []
    of_page = inline(page)
    for block in blocks(page):
      new, wrong = commands(block)
      faults += wrong
      if block.kind == "text" and not new and len(before) == 1:
        output = "".join(f"{line}\n" for line in block.lines)
        at = of_page.index(before[0])
        if not before[0].output and _follows(page, before[0], block):
          of_page[at] = dataclasses.replace(before[0], output=output)
      of_page += new
      before = new
    found += sorted(of_page, key=lambda c: c.line)
  return found, faults


def _follows(page: pathlib.Path, command: Command, block: Block) -> bool:
  """Nothing is between the end of the command's block and the next block."""
  lines = page.read_text().splitlines()
  between = lines[command.line + command.text.count("\n") : block.line - 1]
  return not any(x.strip() and not x.strip().startswith("`") for x in between)


def _bare(text: str) -> str:
  """The text with something in the blanks, as a shell can read it."""
  return BLANK.sub("BLANK", text)


def simple(text: str) -> list[list[str]]:
  """Returns the words of each simple command of a shell text.

  Redirections and assignments before a command are left out.
  """
  text = _bare(text).replace("\\\n", " ")
  text = re.sub(r"(^|\s)#.*", "", text)  # comments; #SBATCH
  text = re.sub(r"\s\d?>&\d|\s\d?>{1,2} *\S+|\s< *\S+", " ", text)
  lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&\n")
  lexer.whitespace, lexer.commenters = " \t", ""
  lexer.whitespace_split = True
  found: list[list[str]] = [[]]
  for word in lexer:
    if word.strip("();|&\n"):
      found[-1].append(word)
    else:
      found.append([])
  for words in found:
    while words and (ASSIGNED.match(words[0]) or words[0] == "do"):
      words.pop(0)
  return [words for words in found if words]


def of_this_project(text: str) -> list[list[str]]:
  """Returns [verb, *words] of each of our commands in a shell text."""
  found = []
  for words in simple(text):
    for word in words:  # gcloud ... ssh --command="..."
      if word.startswith("--command="):
        found += of_this_project(word.removeprefix("--command="))
    if words[0] == "srun":
      words = words[next(i for i, w in enumerate(words) if "/" in w) :]
    program = words[0].rpartition("/")[2]
    module = words[2].split(".") if len(words) > 2 else []
    if program == "vit-jax":
      found.append(words[1:])
    elif program.startswith("python") and words[1] == "-m":
      if module == ["vit_jax"]:
        found.append(words[3:])
      elif module[0] == "vit_jax":
        found.append([".".join(module[1:]), *words[3:]])
  return found


# What stands for the reader's own in a command -> what is in the sandbox.
# In this order; the first ones are of whole commands.
FILLED = {
  # coming_from.md and the like: a value as "..." or a capital letter.
  r"(?<=convert )(?:RUN|F|FILE|SRC) (?:FILE|OUT|DST) --to=(\w+)": (
    r"runs/demo/finetune written/as.\1 --to=\1"
  ),
  r"\.timm(?= --to)": ".safetensors",
  r"--config[= ]\.\.\.(?=\s|$)": "--config=vit_b16:imagenet2012",
  r"(--config=\S*finetune(?:\.py)?):\.\.\.": r"\1:model=B/16,res=224",
  r"--workdir[= ]\.\.\.": "--workdir=runs/other",
  r"--manual_dir=\.\.\.": "--manual_dir=tars",
  r"\binit=\.\.\.": "init=ViT-B_16.npz",
  r"(--checkpoint=)(?:F|FILE)\b": r"\1B_16.npz",
  r"\bFILE\.\.\.": "ViT-B_16.npz B_16.npz",
  r"\bIMAGE\.\.\.": "photos",
  r"(?<![\w/=-])(?:FILE|F)(?![\w/=])": "ViT-B_16.npz",
  r"\b(?:RUN|CHECKPOINT)\b(?!\.)": "runs/vit_b16",
  r"\bVERB\b": "train",
  r"\bDIR\b": "written",
  r"\bNAME\b": "cifar10",
  r"\bhf:cifar10\b": "hf:someone/birds",
  r" \.\.\.$": "",
  r"gs://vit_models/\S+/ViT-B_16\.npz": "ViT-B_16.npz",
  r"/tmp/try": "runs/try",
  # Folders of the reader's.
  r"(?<=webdataset:)[^\s'\"]+": "shards",
  r"(?<=parquet:)[^\s'\"]+": "tables",
  r"(?<=[\s:=])/(?:path|data)/\S*?tars\b|(?<==)/tars\b": "tars",
  r"(?<=[\s:='])/(?:path(/to(/images)?)?|data/birds)(?=[\s,\]'/]|$)": "images",
}

"""Every verb: an example in its help, an answer at once, a quiet end."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tomllib

import jax
import options
import pytest

from vit_jax import __main__ as command
from vit_jax.commands import COMMANDS, plan, predict, report, verify, visualize
from vit_jax.config import cli

HEAVY = {"jax", "flax", "tensorflow", "tensorflow_datasets", "torch", "PIL"}
# Ends as the command does, and prints what it has imported until then.
SPY = (
  "import sys\n"
  "from vit_jax import __main__ as command\n"
  "try:\n  command.main()\n"
  "finally:\n  print(*sys.modules, file=sys.stderr)"
)
# Where the extra `train` is not installed.
WITHOUT = (
  "import sys\n"
  "from vit_jax import __main__ as command\n"
  "sys.modules.update(dict.fromkeys(command.NOT_LEAN))\n"
  "command.main()"
)
ROOT = pathlib.Path(command.__file__).parents[1]
ENV = {**os.environ, "COLUMNS": "80"}


def _run(*args, code=None, stdout=subprocess.PIPE, **environment):
  start = ["-c", code] if code else ["-m", "vit_jax"]
  return subprocess.run(
    [sys.executable, *start, *args],
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
    env={**ENV, **environment},
  )


# Help.


def test_a_wrong_argument_is_refused_at_once():
  done = _run("convert", "a", "b", "--to=tim", code=SPY)
  assert done.returncode and "'tim'" in done.stderr
  assert not HEAVY & {*done.stderr.splitlines()[-1].split()}


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_has_an_example_and_stands_in_the_page(verb, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "80")
  with pytest.raises(SystemExit):
    command.run([verb, "--help"])
  text = capsys.readouterr().out
  written = "python benchmarks/options.py writes docs/commands.md"
  assert options.block(verb, text) in options.PAGE.read_text(), written
  tail = re.split(r"^examples?:\n", text, flags=re.MULTILINE)[1]
  lines = tail.replace("\\\n", " ").splitlines()
  examples = [shlex.split(line) for line in lines if line.strip()]
  # In a pipe, the command that reads from it; others may prepare its data.
  assert any(["vit-jax", verb] == args[:2] for args in examples)
  for args in examples:
    assert args[args.index("vit-jax") + 1] in COMMANDS


def test_a_section_has_the_values_of_the_config(capsys):
  def shown(*args):
    with pytest.raises(SystemExit) as e:
      cli.parse("train", {"workdir": "folder"}, ["--help=model", *args])
    return e.value.code or capsys.readouterr().out

  text = shown("--config=vit_h14")
  assert "  config.model.variant = 'H/14'\n" in text
  assert "config.optim" not in text
  text = shown("--config.model.name=bit")
  assert "  config.model.name = 'bit'\n" in text
  assert "config.model.pool" not in text  # which ResNets do not read


# Arguments.


@pytest.mark.parametrize(
  ("module", "args", "files"),
  [
    (visualize, "x --out=d a.png --patch=1,2 b.png", ["a.png", "b.png"]),
    (predict, "x a.png --json b.png", ["a.png", "b.png"]),
    (report, "a --out=d b", ["a", "b"]),
  ],
)
def test_files_may_follow_a_flag(module, args, files):
  parsed = vars(module.parse(args.split()))
  assert parsed["runs" if module is report else "images"] == files


def test_a_home_is_found_where_a_shell_leaves_the_tilde(tmp_path, monkeypatch):
  """In --flag=~/x, the form of all pages, bash leaves it alone."""
  monkeypatch.setenv("HOME", str(tmp_path))
  argv = ["--config=vit_s16", "--workdir=~/run", "--config.init=~/w.npz"]
  args = cli.parse("train", {"workdir": "folder"}, argv)
  assert args.flags["workdir"] == f"{tmp_path}/run"
  assert args.config.init == f"{tmp_path}/w.npz"
  args = report.parse(["~/x", "--out=~/page"])
  assert (args.runs, args.out) == (["~/x"], f"{tmp_path}/page")


# The process: pipes, signals, devices, libraries.


def test_a_cut_pipe_ends_quietly():
  script = '"$0" -m vit_jax train --help=all | true; echo "${PIPESTATUS[0]}"'
  done = subprocess.run(
    ["bash", "-c", script, sys.executable],
    capture_output=True,
    text=True,
    env=ENV,
  )
  assert (done.stdout.split(), done.stderr) == (["141"], "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it is Linux's")
def test_a_full_disk_ends_in_a_sentence():
  with open("/dev/full", "w") as full:
    done = _run("--help", stdout=full)
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
  assert "No space left" in done.stderr


def test_ctrl_c_ends_in_a_sentence():
  code = (
    "import signal\n"
    "from vit_jax import __main__ as command\n"
    # A process that a shell starts in the background ignores it.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "command.run = lambda argv: signal.raise_signal(signal.SIGINT)\n"
    "command.main()"
  )
  done = _run(code=code)
  assert done.stderr == "\nvit-jax: stopped by Ctrl-C.\n"
  assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("module", [plan, report, verify])
def test_what_needs_no_accelerator_leaves_it_to_others(module, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  argv = ["--config=vit_b16"] if module is plan else ["absent"]
  with pytest.raises(SystemExit):
    module.main(argv)
  assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
  "error, text",
  [
    (
      RuntimeError("Unable to initialize backend 'tpu': already in use by 42"),
      "in use by 42",
    ),
    (AssertionError(), "no device is visible"),
  ],
)
def test_without_its_device_a_command_ends_in_a_sentence(
  error, text, monkeypatch, capsys
):
  def raises(*_):
    raise error

  def main(_):  # the devices are there
    raise type(error)("another")

  serve = COMMANDS["serve"]
  monkeypatch.setitem(COMMANDS, "serve", serve._replace(main=main))
  with pytest.raises(type(error), match="another"):
    command.main(["serve", "x"])
  monkeypatch.setitem(COMMANDS, "serve", serve._replace(main=raises))
  monkeypatch.setattr(jax, "devices", raises)
  with pytest.raises(SystemExit) as e:
    command.main(["serve", "x"])
  assert e.value.code == 1
  assert text in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("platforms", ["foo", "cpu,foo"])
def test_what_jax_itself_raises_is_known(platforms):
  """Of several platforms, jax raises once, and then returns the CPU."""
  done = _run("train", "--config=glyphs", JAX_PLATFORMS=platforms)
  assert done.returncode == 1 and "Traceback" not in done.stderr
  last = done.stderr.splitlines()[-1]
  assert last.startswith("vit-jax: ") and "foo" in last


@pytest.mark.slow
def test_a_library_of_the_extra_train_that_is_missing():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  train = project["optional-dependencies"]["train"]
  packages = {re.split("[><=]", line)[0].replace("-", "_") for line in train}
  imported = packages - {"tensorflow_cpu", "importlib_resources"}
  imported = imported - {"scikit_learn"} | {"sklearn"}
  assert imported == {*command.NOT_LEAN}
  done = _run("train", "--config=glyphs", code=WITHOUT)
  assert done.stderr.startswith("vit-jax: tensorflow_datasets is not installed")
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1

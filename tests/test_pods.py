"""The batch script and the commands of docs, with stand-ins for programs."""

import os
import pathlib
import re
import stat
import subprocess

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "tasks" / "pod.md"
SRUN = """#!/bin/bash
echo "$@" > srun.txt
exit {code}
"""
SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.txt
[ "$1" != show ] || echo "   JobState={state} Reason=None Dependency=(null)"
"""


def _script():
  (text,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.S)
  return text


def _run(folder, code, state="RUNNING", restarts=None):
  """Returns the script's status and what scontrol was asked."""
  for name, text in (
    ("srun", SRUN.format(code=code)),
    ("scontrol", SCONTROL.format(state=state)),
    ("train.sh", _script()),
  ):
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)
  env = {
    "PATH": f"{folder}:/usr/bin:/bin",
    "SLURM_JOB_ID": "4711",
    "SLURM_SUBMIT_DIR": str(folder),
    "SLURM_CPUS_PER_TASK": "12",
  }
  if restarts is not None:
    env["SLURM_RESTART_COUNT"] = str(restarts)
  done = subprocess.run([folder / "train.sh"], env=env, capture_output=True)
  assert not done.stderr, done.stderr
  assert "vit-jax train --config" in (folder / "srun.txt").read_text()
  asked = folder / "scontrol.txt"
  asked = asked.read_text().splitlines() if asked.exists() else []
  return done.returncode, "requeue 4711" in asked


@pytest.mark.parametrize("code", [75, 124, 134, 253, 0, 1, 143])
def test_what_was_interrupted_goes_back_to_the_queue(tmp_path, code):
  """By Ctrl+C or scancel, or by an error of its own, it is not."""
  is_requeued = code in (75, 124, 134, 253)
  assert _run(tmp_path, code) == (0 if is_requeued else code, is_requeued)


def test_restarts_are_bounded_and_a_cancelled_job_stays_cancelled(tmp_path):
  for code, most in ((75, 50), (134, 3)):
    assert _run(tmp_path, code, restarts=most - 1) == (0, True)
    (tmp_path / "scontrol.txt").unlink()
    assert _run(tmp_path, code, restarts=most) == (code, False)
    (tmp_path / "scontrol.txt").unlink(missing_ok=True)
  assert _run(tmp_path, 75, state="CANCELLED") == (75, False)


def test_ssh_returns_while_the_run_goes_on(tmp_path):
  """A shell that waits for the run would keep ssh's pipes open meanwhile."""
  commands = re.findall(r'--command="(.*?)"', PAGE.read_text(), re.S)
  (command,) = (c for c in commands if "nohup" in c)
  program = tmp_path / ".venv" / "bin" / "vit-jax"
  program.parent.mkdir(parents=True)
  program.write_text("#!/bin/bash\necho begun\nread < hold\n")
  program.chmod(stat.S_IRWXU)
  os.mkfifo(tmp_path / "hold")
  shell = ["/bin/bash", "-c", command]
  subprocess.run(shell, cwd=tmp_path, capture_output=True, timeout=10)
  (tmp_path / "hold").write_text("\n")  # waits for its reader
  assert (tmp_path / "train.log").read_text() == "begun\n"

"""A process ends with its code, whatever hangs or fails while it does."""

import pathlib
import queue
import subprocess
import sys

import jax
import pytest

from vit_jax.distributed import exit_codes, peers, supervision

ROOT = pathlib.Path(__file__).parents[2]
CODE = """
import threading, time
from vit_jax.distributed import exit_codes as exits
exits.CLOSING_SECONDS = 0.5
threading.Thread(target=time.sleep, args=[60]).start()  # Python would wait

def full():
  raise OSError("no space left")

def end():
  exits.end(
    exits.HUNG, full, lambda: print("told"), lambda: time.sleep(60),
    lambda: print("too late"),
  )

threading.Thread(target=end).start()
print("words", end="")
time.sleep(60)
"""
# A pipe that nobody reads.
STDERR = """
import sys, tempfile, threading
from vit_jax.distributed import exit_codes as exits
from vit_jax.distributed import supervision
exits.CLOSING_SECONDS = 0.5
guard = supervision._Guard(tempfile.mkdtemp())
threading.Timer(0.5, guard.ends_hung, ["hung        phase step"]).start()
sys.stderr.write("x" * 10**6)
"""
# Its own error is still closing what it has opened, for longer than another's.
OWN_ERROR = """
import tempfile, threading, time
from vit_jax.distributed import exit_codes as exits
from vit_jax.distributed import supervision
from vit_jax.distributed.peers import Lost
supervision.OWN_WORDS_SECONDS = 0.3
guard = supervision._Guard(tempfile.mkdtemp())
guard.notices.ends(FloatingPointError("loss is nan"))
guard.ends_lost(Lost("process 1 ended: loss is nan", code=124))
time.sleep(1.5)
exits.end(exits.ERROR, lambda: print("own words"))
"""

# A run goes on when the connection that started it is closed: stderr is a pipe
# without a reader.
UNHEARD = """
import os, sys
from vit_jax.distributed import exit_codes as exits
from vit_jax.callbacks import progress

inside, outside = os.pipe()
os.dup2(outside, 2)
os.close(inside)
os.close(outside)
with progress.Progress(2) as shown:
  shown.update(1, {"loss": 1.0})
  exits.say("a word")
print("trained")
"""


@pytest.mark.slow
def test_an_error_of_all_is_told_by_each():
  words = []
  of_the_other = OWN_ERROR.replace("FloatingPointError", "RuntimeError")
  none_yet = OWN_ERROR.replace("guard.notices.ends", "str")
  for code in (OWN_ERROR, of_the_other, none_yet):
    done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=60,
    )
    words.append((done.returncode, done.stdout, done.stderr[:4]))
  assert words == [(1, "own words\n", ""), *2 * [(76, "", "lost")]]


@pytest.mark.parametrize(
  "code, want", [(None, 76), (1, 1), (75, 76), (124, 76)]
)
def test_no_process_asks_to_start_again_what_fails_again(
  code, want, monkeypatch, capsys, tmp_path
):
  monkeypatch.setattr(supervision, "OWN_WORDS_SECONDS", 0.0)
  ended = queue.Queue()
  monkeypatch.setattr(exit_codes, "end", lambda code, *_: ended.put(code))
  guard = supervision._Guard(str(tmp_path))
  guard.ends_lost(peers.Lost("process 1 ended: no such file", code))
  assert ended.get(timeout=5) == want
  said = capsys.readouterr().err
  assert "lost        process 1 ended: no such file" in said
  assert (supervision.RESUMES in said) == (want == 76)


@pytest.mark.parametrize(
  "error, told",
  [
    (SystemExit("config.x: a fault"), 1),
    (KeyError("a bug"), 1),
    # A collective fails where another process died, which may be told later.
    (jax.errors.JaxRuntimeError("Gloo: connection reset"), 76),
  ],
)
def test_the_others_are_told_whether_an_error_comes_again(
  error, told, monkeypatch, tmp_path
):
  class Lifeline:
    def ends(self, how, code):
      codes.append(code)

  def end(code, *closing):
    codes.append(code)
    for act in closing:
      act()

  codes = []
  monkeypatch.setattr(supervision, "WORD_SECONDS", 0.0)
  monkeypatch.setattr(exit_codes, "end", end)
  guard = supervision._Guard(str(tmp_path))
  guard._lifeline = Lifeline()
  guard.fails(error)
  assert codes == [1, told]


@pytest.mark.slow
def test_a_hang_of_stderr_ends_too():
  with subprocess.Popen(
    [sys.executable, "-c", STDERR], cwd=ROOT, stderr=subprocess.PIPE
  ) as process:
    try:
      assert process.wait(60) == 124
    finally:
      process.kill()


def test_what_hangs_or_fails_keeps_no_process():
  done = subprocess.run(
    [sys.executable, "-u", "-c", CODE],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=20,
  )
  assert done.returncode == 124
  assert "words" in done.stdout and "told" in done.stdout
  assert "too late" not in done.stdout
  assert done.stderr == "OSError: no space left\n"


def test_a_run_that_nobody_hears_goes_on():
  done = subprocess.run(
    [sys.executable, "-c", UNHEARD],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (0, "trained\n")

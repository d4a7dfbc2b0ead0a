"""A process ends with its code, whatever hangs or fails while it does."""

import jax
import pytest
import several

from vit_jax.distributed import exit_codes

CODE = """
import threading, time
from vit_jax.distributed import exit_codes as exits
exits.CLOSING_SECONDS = 0.5
threading.Thread(target=time.sleep, args=[60]).start()  # Python would wait

def full():
  raise OSError("no space left")

def end():
  exits.end(
    exits.EXIT_HUNG, full, lambda: print("called"), lambda: time.sleep(60),
    lambda: print("too late"),
  )

threading.Thread(target=end).start()
print("a text", end="")
time.sleep(60)
"""
# A run goes on when the connection that started it is closed: stderr is a pipe
# without a reader.
UNHEARD = """
import os
from vit_jax.distributed import exit_codes as exits
from vit_jax.callbacks import progress

inside, outside = os.pipe()
os.dup2(outside, 2)
os.close(inside)
os.close(outside)
shown = progress.Progress(2)
shown.on_start(0, None, {})
shown.on_step(1, {}, {})
shown.on_log(1, {"loss": 1.0})
progress.note("a note")
exits.say("a word")
print("trained")
"""


def test_what_hangs_or_fails_keeps_no_process():
  with several.program(CODE) as process:
    out, err = process.communicate(timeout=60)
  assert process.returncode == 124
  assert "a text" in out and "called" in out and "too late" not in out
  assert err == "OSError: no space left\n"


def test_one_of_several_processes_without_a_device(monkeypatch, capfd):
  """No stack before the sentence of `__main__`, and no second try to start."""
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(jax, "process_index", lambda: 1 / 0)
  error = RuntimeError("Unable to initialize backend 'tpu': no libtpu")
  exit_codes.end_if_joined(error, 1.0)
  assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_that_nobody_hears_goes_on():
  with several.program(UNHEARD) as process:
    out, _ = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "trained\n")

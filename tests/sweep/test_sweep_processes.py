"""A search of several processes follows process 0, and none waits for an error.

Two real processes, each with a disk of its own.
"""

import subprocess
import sys

import pytest
import several

CODE = """
import sys, time, jax
index, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, index)
from etils import epath
from vit_jax.finetune import one_run
from vit_jax.distributed import exit_codes
for name in ("both.json", "first.json", "second.json", "none.json"):
  content = one_run.read_by_first(epath.Path(folder) / str(index) / name)
  print("read", content, flush=True)  # gloo prints lines of its own
if index == int(sys.argv[4]):
  exit_codes.refuse("--available: got an error")
time.sleep(60)
"""
FILES = {
  "0/both.json": "[0]",
  "1/both.json": '["another, and longer"]',
  "0/first.json": '{"a": 1}',
  "1/second.json": '{"b": 2}',
}


@pytest.mark.nightly
@pytest.mark.parametrize("refuses", [0, 1])
def test_the_first_decides_and_who_refuses_ends_at_once(tmp_path, refuses):
  for name, text in FILES.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  given = several.address(), str(tmp_path), str(refuses)
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", CODE, str(i), *given],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=several.ROOT,
    )
    for i in range(2)
  ]
  try:
    out, err = processes[refuses].communicate(timeout=120)
    assert processes[refuses].returncode == 1
    assert "--available: got an error\n" in err and "Traceback" not in err
    # If it was process 0, jax ends the other, which otherwise goes on.
    processes[1 - refuses].kill()
    other, _ = processes[1 - refuses].communicate(timeout=30)
    for text in (out, other):
      read = [x[5:] for x in text.splitlines() if x.startswith("read ")]
      assert read == ["[0]", "{'a': 1}", "None", "None"]
  finally:
    for process in processes:
      process.kill()

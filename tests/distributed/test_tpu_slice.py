"""A TPU VM meets other hosts where there are some, and one process of each."""

import fnmatch
import glob
import http.server
import importlib.util
import subprocess
import sys
import threading
import time

import pytest
import several

from vit_jax.config import ConfigError
from vit_jax.distributed import tpu_slice

NAMES = (*tpu_slice.NAMES, *tpu_slice.BOUNDS, "TPU_WORKER_ID")
OTHERS = (
  "JAX_PLATFORMS",
  "JAX_COORDINATOR_PORT",
  "MEGASCALE_NUM_SLICES",
  "TPU_SKIP_MDS_QUERY",
)
TWO = {"TPU_WORKER_HOSTNAMES": "host0,host1"}
ONE = {"TPU_WORKER_HOSTNAMES": "host0"}
# What jax wants of a slice of two processes, both on this machine.
PAIR = {
  "JAX_FORCE_TPU_INIT": "1",
  "TPU_WORKER_HOSTNAMES": "localhost,localhost",
  "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
  "MEGASCALE_NUM_SLICES": "1",
  "MEGASCALE_SLICE_ID": "0",
}


@pytest.fixture(autouse=True)
def tpu_vm(monkeypatch):
  """A machine without variables of a slice.

  Port 9 of the own machine stands for a metadata server that is not there.
  """
  for name in (*NAMES, *OTHERS):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")


@pytest.fixture
def metadata(monkeypatch):
  """A metadata server: what it answers by key, and the keys it was asked."""
  answers, asked = {}, []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802  (the name is that of the base class)
      key = self.path.rpartition("/")[2]
      asked.append(key)
      self.send_response(200 if key in answers else 404)
      self.end_headers()
      self.wfile.write(answers.get(key, "<html>").encode())

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
  yield answers, asked
  server.shutdown()
  server.server_close()


def _find(monkeypatch, **variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  return tuple(tpu_slice.find())


@pytest.mark.parametrize(
  "libtpu, chips, want",
  [
    (True, ["/dev/accel0"], True),
    (True, ["/dev/vfio/0"], True),
    (True, [], False),
    (False, ["/dev/accel0"], False),
  ],
)
def test_what_a_tpu_vm_is(monkeypatch, libtpu, chips, want):
  monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu or None)
  monkeypatch.setattr(glob, "glob", lambda p: fnmatch.filter(chips, p))
  assert tpu_slice.is_tpu_vm() == want


@pytest.mark.parametrize(
  "variables, is_shared",
  [
    # The slice has other hosts.
    (TWO, True),
    (TWO | {"JAX_PLATFORMS": "tpu,cpu"}, True),
    (ONE | {"TPU_PROCESS_ADDRESSES": "a:1,b:1,c:1"}, True),
    (ONE | {"MEGASCALE_NUM_SLICES": "2"}, True),
    # The TPU is left out, or its other hosts are.
    (TWO | {"JAX_PLATFORMS": "cpu"}, False),
    (TWO | {"TPU_PROCESS_BOUNDS": "1,1,1"}, False),
    # There are none.
    (ONE | {"MEGASCALE_NUM_SLICES": "1"}, False),
    ({"TPU_SKIP_MDS_QUERY": "1"}, False),
    (ONE | {"TPU_SKIP_MDS_QUERY": "1", "TPU_PROCESS_BOUNDS": "2,2,1"}, True),
    # Nobody tells.
    ({}, False),
    ({"TPU_PROCESS_ADDRESSES": "local"}, False),
  ],
)
def test_variables_of_a_slice(monkeypatch, variables, is_shared):
  assert _find(monkeypatch, **variables)[0] == is_shared


@pytest.mark.parametrize(
  "workers, slices, is_shared",
  [
    ("10.0.0.2", "", False),
    ("a:0:10.0.0.2,b:1:10.0.0.3", "", True),
    ("10.0.0.2", "MEGASCALE_NUM_SLICES: '2'", True),
  ],
)
def test_answers_of_the_metadata_server(
  monkeypatch, metadata, workers, slices, is_shared
):
  answers, asked = metadata
  answers["worker-network-endpoints"] = workers
  answers["tpu-env"] = f"ZONE: 'z'\n{slices}"
  assert _find(monkeypatch)[0] == is_shared
  asked.clear()
  one = _find(monkeypatch, **ONE)  # of the slices the variables say nothing
  assert asked == ["tpu-env"] and one[0] == bool(slices)


def test_hosts_in_a_file(monkeypatch, tmp_path):
  path = tmp_path / "hosts"
  path.write_text("a:1,b:1")
  assert _find(monkeypatch, TPU_PROCESS_ADDRESSES_PATH=str(path))[0]


def _python(code, **env):
  env_without_platform = {
    k: v for k, v in several.env().items() if k != "JAX_PLATFORMS"
  }
  return subprocess.Popen(
    [sys.executable, "-c", code],
    env=env_without_platform | {"PYTHONUNBUFFERED": "1"} | env,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


LOCKS = """
import sys
from vit_jax.config import ConfigError
from vit_jax.distributed import tpu_slice
try:
  tpu_slice.lock()
except ConfigError as e:
  sys.exit(str(e))
print("locked")
sys.stdin.read()
"""


def test_one_process_of_a_host_joins(monkeypatch):
  port = several.address().split(":")[1]
  monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
  first = _python(LOCKS, JAX_COORDINATOR_PORT=port)
  assert first.stdout.readline() == "locked\n", first.stderr.read()
  with pytest.raises(ConfigError) as e:
    tpu_slice.lock()
  (error,) = e.value.errors
  assert "another process of this host" in error and port in error
  # Nobody is met as another worker, or at another port.
  with monkeypatch.context() as patch:
    patch.setenv("TPU_WORKER_ID", "1")
    tpu_slice.lock()
    patch.setenv("TPU_WORKER_ID", "0")
    patch.setenv("JAX_COORDINATOR_PORT", several.address().split(":")[1])
    tpu_slice.lock()
  first.kill()
  first.communicate()
  tpu_slice.lock()  # the dead process has left its place


JOINS = """
import sys, time
import jax
from vit_jax.config import ConfigError
from vit_jax.distributed import processes
jax.config.update("jax_platforms", "cpu")  # this machine has no TPU
try:
  processes.initialise(timeout=60)
except ConfigError as e:
  sys.exit(str(e))
print(jax.distributed.is_initialized())
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_host_that_is_alone_starts_no_coordinator():
  env = PAIR | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
  out, err = _python(JOINS, **env).communicate(timeout=60)
  assert out == "False\n", err
  assert "this process works alone" in err


ALONE = {
  "benchmark": ["--config=vit_b16:imagenet2012"],
  "convert": ["a.npz", "b.npz", "--to=npz"],
  "predict": ["a.npz", "a.jpg"],
  "serve": ["a.npz"],
  "visualize": ["a.npz", "--out=b.png"],
}


@pytest.mark.parametrize(
  "verb",
  [
    "predict",
    *(pytest.param(v, marks=pytest.mark.slow) for v in ALONE if v != "predict"),
  ],
)
def test_a_command_without_others_is_refused_on_a_part_of_a_slice(verb):
  """libtpu would wait for the other hosts, without a word."""
  env_without_platform = {
    k: v for k, v in several.env().items() if k != "JAX_PLATFORMS"
  }
  command = [sys.executable, "-m", "vit_jax", verb, *ALONE[verb]]

  # convert uses the TPU only if JAX_PLATFORMS names it.
  platforms = {"JAX_PLATFORMS": "tpu,cpu" if verb == "convert" else ""}
  done = subprocess.run(
    command,
    env=env_without_platform | PAIR | platforms,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (1, "")
  assert done.stderr.startswith("TPU slice: got one of several hosts")


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["0", "1"])
def test_a_second_command_on_a_host_leaves_the_run_alone(worker):
  """Without the lock jax aborts both processes of the run (134)."""
  env = PAIR | {"JAX_COORDINATOR_PORT": several.address().split(":")[1]}
  run = [_python(JOINS, **env, TPU_WORKER_ID=str(i)) for i in range(2)]
  for process in run:
    # After a line of Gloo.
    assert "True\n" in iter(process.stdout.readline, "")
  out, err = _python(JOINS, **env, TPU_WORKER_ID=worker).communicate(timeout=60)
  assert out == "" and "another process of this host" in err
  time.sleep(2)
  for process in run:
    process.stdin.write("\n")
    process.stdin.close()
  assert [process.wait(60) for process in run] == [0, 0]

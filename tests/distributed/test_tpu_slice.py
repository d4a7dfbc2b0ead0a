"""A TPU VM meets other hosts where there are some, and one process of each."""

import fnmatch
import glob
import http.server
import importlib.util
import threading

import pytest
import several

from vit_jax.commands import predict
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
  serve = threading.Thread(target=server.serve_forever, args=[0.01])
  serve.start()
  monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
  yield answers, asked
  server.shutdown()
  server.server_close()


@pytest.fixture
def is_shared(monkeypatch):
  """Whether the slice is shared, where these variables are set."""

  def find(**variables):
    with monkeypatch.context() as patch:
      for name, value in variables.items():
        patch.setenv(name, value)
      return tpu_slice.find().is_shared

  return find


def test_what_a_tpu_vm_is(monkeypatch):
  monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
  for libtpu, chips, want in (
    (True, "/dev/accel0", True),
    (True, "/dev/vfio/0", True),
    (True, "", False),
    (None, "/dev/accel0", False),
  ):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _, it=libtpu: it)
    found = lambda pattern, it=chips: fnmatch.filter([it], pattern)
    monkeypatch.setattr(glob, "glob", found)
    assert tpu_slice.is_tpu_vm() == want


@pytest.mark.parametrize(
  "variables, want",
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
def test_variables_of_a_slice(is_shared, variables, want):
  assert is_shared(**variables) == want


def test_answers_of_the_metadata_server(is_shared, metadata):
  answers, asked = metadata
  for workers, slices, want in (
    ("10.0.0.2", "", False),
    ("a:0:10.0.0.2,b:1:10.0.0.3", "", True),
    ("10.0.0.2", "MEGASCALE_NUM_SLICES: '2'", True),
  ):
    answers["worker-network-endpoints"] = workers
    answers["tpu-env"] = f"ZONE: 'z'\n{slices}"
    assert is_shared() == want
    asked.clear()
    one = is_shared(**ONE)  # about the slices the variables say nothing
    assert asked == ["tpu-env"] and one == bool(slices)


def test_hosts_in_a_file(is_shared, tmp_path):
  path = tmp_path / "hosts"
  path.write_text("a:1,b:1")
  assert is_shared(TPU_PROCESS_ADDRESSES_PATH=str(path))


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
  with several.program(LOCKS, JAX_COORDINATOR_PORT=port) as first:
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
  tpu_slice.lock()  # the dead process has left its place


def test_a_command_without_others_is_refused_on_a_part_of_a_slice(monkeypatch):
  """libtpu would wait for the other hosts, without a word."""
  # What jax wants of a slice of two processes, both on this machine.
  for name, value in {
    "JAX_FORCE_TPU_INIT": "1",
    "TPU_WORKER_HOSTNAMES": "localhost,localhost",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    "MEGASCALE_NUM_SLICES": "1",
    "MEGASCALE_SLICE_ID": "0",
  }.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(SystemExit, match="TPU slice: .*TPU_WORKER_HOSTNAMES"):
    predict.main(["a.npz", "a.jpg"])

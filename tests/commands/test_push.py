"""Uploads to a stand-in for the hub, and what it may refuse."""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from vit_jax.commands import convert as convert_command
from vit_jax.exporting import convert

pytest.importorskip("huggingface_hub")

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_token.weights.npz"
SECRET = "hf_secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
  """What huggingface_hub 2 calls: create, preupload, LFS, commit, read.

  refuse: Status of the answer to each creation of a repository; 0: none.
  """

  def __init__(self, refuse: int = 0):
    self.refuse = refuse
    self.host = ""
    self.asked: list[str] = []
    self.created: list[dict] = []
    self.cards: list[str] = []
    self.files: dict[str, bytes] = {}
    self.large: dict[str, bytes] = {}  # by SHA-256

  def answer(self, method: str, path: str, body: bytes, token: str | None):
    """Returns status, JSON or bytes, and headers."""
    self.asked.append(f"{method} {path}")
    if not path.startswith("/lfs/") and token != f"Bearer {SECRET}":
      return 401, {"error": "Invalid username or password."}, {}
    if path == "/api/repos/create":
      if self.refuse:
        return self.refuse, {"error": "You don't have the rights."}, {}
      self.created.append(json.loads(body))
      return 200, {"url": f"{self.host}/me/vit"}, {}
    if path == "/api/validate-yaml":  # of README.md
      self.cards.append(json.loads(body)["content"])
      return 200, {"errors": [], "warnings": []}, {}
    if path == "/api/models/me/vit/preupload/main":
      files = [
        {
          "path": f["path"],
          "uploadMode": "lfs" if f["path"].endswith("tensors") else "regular",
          "shouldIgnore": False,
        }
        for f in json.loads(body)["files"]
      ]
      return 200, {"files": files}, {}
    if path == "/me/vit.git/info/lfs/objects/batch":
      objects = [
        {**o, "actions": {"upload": {"href": f"{self.host}/lfs/{o['oid']}"}}}
        for o in json.loads(body)["objects"]
      ]
      return 200, {"objects": objects}, {}
    if method == "PUT" and path.startswith("/lfs/"):
      self.large[hashlib.sha256(body).hexdigest()] = body
      return 200, {}, {}
    if path == "/api/models/me/vit/commit/main":
      for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
          self.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
          self.files[value["path"]] = self.large[value["oid"]]
      url = f"{self.host}/me/vit/commit/{COMMIT}"
      return 200, {"commitUrl": url, "commitOid": COMMIT}, {}
    if path.startswith("/api/models/me/vit/tree/"):
      about = [
        {"type": "file", "path": f, "size": len(data), "oid": "0" * 40}
        for f, data in self.files.items()
      ]
      return 200, about, {}
    if path.startswith("/api/models/me/vit") and self.created:
      siblings = [{"rfilename": f} for f in self.files]
      return 200, {"id": "me/vit", "sha": COMMIT, "siblings": siblings}, {}
    name = path.rsplit("/", 1)[-1]
    if path.startswith("/me/vit/resolve/") and name in self.files:
      tag = hashlib.sha1(self.files[name]).hexdigest()
      headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}
      return 200, self.files[name], headers
    return 404, {"error": "Repository not found"}, {}


@contextlib.contextmanager
def serve(hub):
  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
      if "chunked" in self.headers.get("Transfer-Encoding", ""):
        body = b""
        while size := int(self.rfile.readline(), 16):
          body += self.rfile.read(size)
          self.rfile.readline()
        self.rfile.readline()
      else:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
      path = self.path.partition("?")[0]
      status, data, headers = hub.answer(
        self.command, path, body, self.headers.get("Authorization")
      )
      if not isinstance(data, bytes):
        data = json.dumps(data).encode()
        headers["Content-Type"] = "application/json"
      self.send_response(status)
      for name, value in headers.items():
        self.send_header(name, value)
      self.send_header("Content-Length", str(len(data)))
      self.end_headers()
      if self.command != "HEAD":
        self.wfile.write(data)

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.host = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()


def call(code, hub, tmp_path, token=SECRET):
  """Runs code in a process, as the hub's address is read at its import."""
  env = os.environ | {
    "HF_ENDPOINT": hub.host,
    "HF_HOME": str(tmp_path / "hub"),
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_TOKEN": token,
    "JAX_PLATFORMS": "cpu",
  }
  return subprocess.run(
    [sys.executable, "-c", code], env=env, capture_output=True, text=True
  )


def pushed(folder):
  return f"""
from vit_jax.exporting import convert
try:
  print(convert.push({str(folder)!r}, "me/vit"))
except ValueError as e:
  print(e)
"""


@pytest.fixture
def folder(tmp_path):
  made = tmp_path / "vit"
  made.mkdir()
  (made / "config.json").write_text("{}")
  return made


@pytest.mark.slow
def test_there_and_back(tmp_path):
  """Converted, uploaded and loaded again: the same logits."""
  dst = tmp_path / "vit"
  code = f"""
import numpy as np
import vit_jax
from vit_jax.commands import convert
convert.main([{str(TOKEN)!r}, {str(dst)!r}, "--to=hf", "--push=me/vit"])
one = vit_jax.load({str(TOKEN)!r}, verbose=False)
other = vit_jax.load("hf-hub:me/vit", verbose=False)
images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3))
a, b = (np.asarray(v(images.astype("float32"))[0]) for v in (one, other))
assert np.array_equal(a, b)
print("same")
"""
  with serve(Hub()) as hub:
    done = call(code, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "same"
    assert f"{'':<16}uploaded to {hub.host}/me/vit" in lines
  assert [(r["name"], r["organization"]) for r in hub.created] == [
    ("vit", "me")
  ]
  assert hub.created[0].get("private") or (
    hub.created[0].get("visibility") == "private"
  )
  assert {*hub.cards} == {hub.files["README.md"].decode()}
  assert hub.files == {p.name: p.read_bytes() for p in dst.iterdir()}
  assert set(hub.files) == {
    "README.md",
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
  }
  assert hub.files["model.safetensors"] in hub.large.values()
  assert b"vit_jax.load('hf-hub:me/vit')" in hub.files["README.md"]
  assert SECRET.encode() not in b"".join(hub.files.values())


@pytest.mark.slow
@pytest.mark.parametrize(
  "token, refuse, message",
  [
    ("hf_old", 0, "The token is not valid: `hf auth login`, or another HF_TOK"),
    (SECRET, 403, "The token may not write to me/vit: take one that may, or a"),
  ],
)
def test_what_the_hub_refuses(tmp_path, folder, token, refuse, message):
  with serve(Hub(refuse)) as hub:
    done = call(pushed(folder), hub, tmp_path, token)
  assert done.stdout.startswith("--push: me/vit was not uploaded: "), done
  assert message in done.stdout
  later = f"upload it later with `hf upload me/vit {folder}`.\n"
  assert done.stdout.endswith(f" {folder} is complete: {later}")
  assert not hub.files


@pytest.mark.slow
def test_without_a_network(tmp_path, folder):
  with serve(Hub()) as hub:
    pass  # gone
  done = call(pushed(folder), hub, tmp_path)
  assert "me/vit was not uploaded: " in done.stdout, done
  assert "Is the network there? " in done.stdout


def test_what_is_checked_before_anything_is_written(tmp_path, monkeypatch):
  import huggingface_hub

  dst = tmp_path / "x"

  def error(*more):
    with pytest.raises(SystemExit) as e:
      convert_command.main(["none.npz", str(dst), "--to=hf", *more])
    assert not dst.exists()
    return str(e.value)

  assert error("--push=vit") == "--push: got 'vit', expected OWNER/NAME."
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
  assert error("--push=me/vit").startswith(
    "--push: got no token, expected one: `hf auth login`, or set HF_TOKEN."
  )
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  assert error("--push=me/vit") == (
    "--push: got no huggingface_hub, expected it installed: pip install"
    " huggingface_hub."
  )
  with pytest.raises(ValueError, match="expected OWNER/NAME"):
    convert.check_push("a/b/c")


def test_only_folders_of_transformers(tmp_path, capsys):
  with pytest.raises(SystemExit):
    convert_command.main(
      [str(TOKEN), str(tmp_path / "x"), "--to=orbax", "--push=a/b"]
    )
  assert "--push: got --to=orbax, expected --to=hf." in capsys.readouterr().err

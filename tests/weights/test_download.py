"""Weights by address or name, from servers on this machine, and without one."""

import concurrent.futures
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import weights
from vit_jax.families import published
from vit_jax.tools.exporting import convert
from vit_jax.weights import download

TOKEN = pathlib.Path(__file__).parents[1] / "data" / "vit_token.weights.npz"


@contextlib.contextmanager
def server(answer):
  """Serves `answer(handler)` on a free port; yields address and requests."""
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(f"{self.command} {self.path}")
      answer(self)

    do_HEAD = do_GET

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as it:
    threading.Thread(target=it.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{it.server_port}", asked
    it.shutdown()


def send(handler, data, code=200, length=None, **headers):
  handler.send_response(code)
  handler.send_header("Content-Length", length or len(data))
  for name, value in headers.items():
    handler.send_header(name.replace("_", "-"), value)
  handler.end_headers()
  if handler.command == "GET":
    handler.wfile.write(data)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "vit_jax" / "weights"


def error(path, kind=FileNotFoundError):
  with pytest.raises(kind) as e:
    weights.read(path)
  return str(e.value)


# https://


def test_a_file_is_downloaded_once(cache, capsys):
  with server(lambda h: send(h, TOKEN.read_bytes())) as (host, asked):
    url = f"{host}/models/vit%20b.npz?download=true"
    vit = vit_jax.load(url)
    (file,) = cache.iterdir()
    assert file.read_bytes() == TOKEN.read_bytes()
    assert file == download.cached(url)
    assert hashlib.md5(url.encode()).hexdigest() in file.name
    printed = capsys.readouterr()
    assert url in printed.out and str(file) in printed.err
  # Without the server as well.
  again = vit_jax.load(url, verbose=False)
  assert capsys.readouterr().err == "" and len(asked) == 1
  assert again.metadata()["source"] == url
  jax.tree.map(np.testing.assert_array_equal, vit.params, again.params)


def test_processes_of_a_host_wait_for_one_download(cache):
  def slowly(handler):
    time.sleep(0.3)
    send(handler, TOKEN.read_bytes())

  with server(slowly) as (host, asked):
    url = f"{host}/vit.npz"
    # A lock belongs to whoever opened the folder: so do threads wait.
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      paths = list(pool.map(weights.read, [url] * 3))
  assert len(asked) == 1
  assert {w.path for w in paths} == {url}


def test_what_fails_leaves_nothing_and_says_what_to_do(cache):
  answers = {
    "/short": lambda h: send(h, bytes(5000), length=9000),
    "/gone": lambda h: send(h, b"gone", 404),
    "/page": lambda h: send(h, b"<html>Sign in</html>"),
  }
  with server(lambda h: answers[h.path](h)) as (host, _):
    for path, words in (("/short", "4000 more"), ("/gone", "404")):
      text = error(host + path)
      assert words in text and host + path in text
      assert list(cache.iterdir()) == []
    # A page instead of weights can be fetched again.
    url = f"{host}/page"
    text, file = error(url, ValueError), download.cached(url)
    assert text.startswith(f"{url}: got '{file}'") and f"delete {file}" in text
  # Without a network: by hand, as the message says.
  file = download.cached(url := f"{host}/x/vit.npz")
  assert str(file) in error(url)
  file.write_bytes(TOKEN.read_bytes())
  assert weights.read(url).path == url


def test_published_buckets_are_read_by_https():
  path = "gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz"
  name = "vit_models/imagenet21k%2Bimagenet2012/ViT-B_16.npz"
  assert download.is_remote(path)
  assert published.https(path) == f"{published.HOST}/{name}"
  assert not download.is_remote("gs://my-bucket/vit.npz")


# Names.


def test_the_name_of_a_model_is_answered_by_its_files(tmp_path, monkeypatch):
  for name, file in {
    "B/16": "gs://vit_models/imagenet21k/ViT-B_16.npz",
    "ViT-B_16": "hf-hub:timm/vit_base_patch16_224.augreg_in21k",
    "R50x1": "gs://bit_models/BiT-S-R50x1.npz",
  }.items():
    text = error(name, ValueError)
    assert repr(name) in text and file in text
  # An existing file has precedence.
  monkeypatch.chdir(tmp_path)
  convert.convert(vit_jax.load(TOKEN, verbose=False), "B/16", "orbax")
  assert weights.read("B/16").format == "checkpoint"


def test_a_name_of_a_hub_without_its_prefix(tmp_path, monkeypatch):
  timm = "timm/vit_base_patch16_224"
  for name, address in {
    timm: f"{timm}.augreg2_in21k_ft_in1k",
    "vit_base_patch16_224": f"{timm}.augreg2_in21k_ft_in1k",
    "google/vit-base-patch16-224": "google/vit-base-patch16-224",
    "somebody/a-model": "somebody/a-model",
  }.items():
    assert error(name).endswith(f"Did you mean 'hf-hub:{address}'?")
  # A missing file is none.
  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs").mkdir()
  for path in ("runs/mine", "models/x.npz", "a/b/c", "/a/b"):
    assert "hf-hub" not in error(path)


# hf-hub:


HUB = """
import sys, vit_jax
from vit_jax.weights import download
for name in sys.argv[1:]:
  try:
    print((report := vit_jax.load(name, verbose=False).report).path)
    print(*(x for x in report.notes if "revision" in x))
    print(download.pinned(name))
  except FileNotFoundError as e:
    print(e)
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
def test_a_model_of_a_hub(tmp_path):
  """The address of the hub is read when its library is imported."""
  pytest.importorskip("huggingface_hub")
  folder = tmp_path / "model"
  convert.convert(vit_jax.load(TOKEN), str(folder), "hf")
  files = {p.name: p.read_bytes() for p in folder.iterdir()}
  listed = [
    {"type": "file", "path": f, "size": len(data), "oid": "0" * 40}
    for f, data in [*files.items(), ("pytorch_model.bin", b"x")]
  ]
  siblings = [{"rfilename": about["path"]} for about in listed]

  def answer(handler):
    path = handler.path.partition("?")[0]
    name = path.rsplit("/", 1)[-1]
    if path.startswith("/api/models/me/vit/"):
      about = {"id": "me/vit", "sha": COMMIT, "siblings": siblings}
      about = listed if "/tree/" in path else about  # as new libraries ask
      send(handler, json.dumps(about).encode(), Content_Type="application/json")
    elif path.startswith(f"/me/vit/resolve/{COMMIT}/") and name in files:
      tag = hashlib.sha1(files[name]).hexdigest()
      send(handler, files[name], X_Repo_Commit=COMMIT, ETag=f'"{tag}"')
    else:
      send(handler, b"", 404)

  def load(host, *names):
    env = os.environ | {"HF_ENDPOINT": host, "HF_HOME": str(tmp_path / "hub")}
    argv = [sys.executable, "-c", HUB, *names]
    out = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()

  with server(answer) as (host, asked):
    names = ("hf-hub:me/vit", "hf-hub:me/vit@main", "hf-hub:me/none")
    *paths, none = load(host, *names)
    pinned = f"hf-hub:me/vit@{COMMIT}"
    note = f"to load this revision later: {pinned}"
    assert paths == [names[0], note, pinned, names[1], "", pinned]
    assert none.startswith("got 'hf-hub:me/none', which cannot be downloaded: ")
    assert not any("pytorch_model" in path for path in asked)
  assert load(host, *names[:2]) == paths  # without a network: from the cache


def test_an_adapter_of_a_hub(tmp_path, monkeypatch):
  hub = pytest.importorskip("huggingface_hub")
  names = ["adapter_config.json", "adapter_model.safetensors", "adapter.bin"]

  def fetch(name, revision, allow_patterns):
    for file in names:
      if any(map(pathlib.PurePath(file).match, allow_patterns)):
        (tmp_path / file).write_bytes(b"")
    return str(tmp_path)

  monkeypatch.setattr(hub, "snapshot_download", fetch)
  assert download.local("hf-hub:me/lora").name == tmp_path.name
  assert sorted(p.name for p in tmp_path.glob("adapter*")) == names[:2]

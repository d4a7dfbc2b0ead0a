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

DATA = pathlib.Path(__file__).parents[1] / "data"
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TOKEN = DATA / "vit_token.weights.npz"


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
    threading.Thread(target=it.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{it.server_port}", asked
    it.shutdown()


def send(handler, data, code=200, length=None, **headers):
  handler.send_response(code)
  if length is not False:
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
    assert url in printed.out and url in printed.err
    assert str(file) in printed.err
    again = vit_jax.load(url, verbose=False)
    assert capsys.readouterr().err == "" and len(asked) == 1
  # Without the server as well.
  assert vit_jax.load(url, verbose=False).metadata()["source"] == url
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


@pytest.mark.parametrize(
  "answer, words",
  [
    (lambda h: send(h, bytes(5000), length=9000), "4000 more"),
    (lambda h: send(h, b"gone", 404), "404"),
  ],
)
def test_what_fails_leaves_nothing(cache, answer, words):
  with server(answer) as (host, _):
    text = error(url := f"{host}/vit.npz")
  assert words in text and url in text
  assert list(cache.iterdir()) == []


def test_a_page_instead_of_weights_can_be_fetched_again(cache):
  with server(lambda h: send(h, b"<html>Sign in</html>")) as (host, _):
    url = f"{host}/vit.npz"
    text, file = error(url, ValueError), download.cached(url)
  assert text.startswith(f"{url}: got '{file}'") and f"delete {file}" in text


def test_without_a_network_the_text_says_what_to_do(cache):
  with server(lambda h: send(h, b"")) as (host, _):
    pass  # the server is gone
  url = f"{host}/x/vit.npz"
  file = download.cached(url)
  assert str(file) in error(url)
  # By hand, as the message says.
  file.write_bytes(TOKEN.read_bytes())
  assert weights.read(url).path == url


# Names.


@pytest.mark.parametrize(
  "name, file",
  [
    ("B/16", "gs://vit_models/imagenet21k/ViT-B_16.npz"),
    ("ViT-B_16", "hf-hub:timm/vit_base_patch16_224.augreg_in21k"),
    ("R50x1", "gs://bit_models/BiT-S-R50x1.npz"),
  ],
)
def test_the_name_of_a_model_is_answered_by_its_files(name, file):
  text = error(name, ValueError)
  assert repr(name) in text and file in text


def test_an_existing_file_has_precedence(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  convert.convert(vit_jax.load(TOKEN), "B/16", "orbax")
  assert weights.read("B/16").format == "checkpoint"


# hf-hub:


TIMM_B16 = "timm/vit_base_patch16_224"


@pytest.mark.parametrize(
  "name, address",
  [
    (TIMM_B16, f"{TIMM_B16}.augreg2_in21k_ft_in1k"),
    ("vit_base_patch16_224", f"{TIMM_B16}.augreg2_in21k_ft_in1k"),
    ("google/vit-base-patch16-224", "google/vit-base-patch16-224"),
    ("somebody/a-model", "somebody/a-model"),
  ],
)
def test_a_name_of_a_hub_without_its_prefix(name, address):
  assert error(name).endswith(f"Did you mean 'hf-hub:{address}'?")


def test_a_missing_file_is_no_name_of_a_hub(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs").mkdir()
  for path in ("runs/mine", "models/x.npz", "a/b/c", "/a/b"):
    assert "hf-hub" not in error(path)


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


def test_published_buckets_are_read_by_https():
  path = "gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz"
  name = "vit_models/imagenet21k%2Bimagenet2012/ViT-B_16.npz"
  assert download.is_remote(path)
  assert published.https(path) == f"{published.HOST}/{name}"
  assert not download.is_remote("gs://my-bucket/vit.npz")


@pytest.mark.slow
def test_a_model_of_a_hub(tmp_path):
  """The address of the hub is read when its library is imported."""
  pytest.importorskip("huggingface_hub")
  folder = tmp_path / "model"
  convert.convert(vit_jax.load(TOKEN), str(folder), "hf")
  files = {p.name: p.read_bytes() for p in folder.iterdir()}

  def answer(handler):
    path = handler.path.partition("?")[0]
    name = path.rsplit("/", 1)[-1]
    if path.startswith("/api/models/me/vit/tree/"):  # as new libraries ask
      about = [
        {"type": "file", "path": f, "size": len(data), "oid": "0" * 40}
        for f, data in [*files.items(), ("pytorch_model.bin", b"x")]
      ]
      send(handler, json.dumps(about).encode(), Content_Type="application/json")
    elif path.startswith("/api/models/me/vit/"):
      siblings = [{"rfilename": f} for f in [*files, "pytorch_model.bin"]]
      about = {"id": "me/vit", "sha": COMMIT, "siblings": siblings}
      send(handler, json.dumps(about).encode(), Content_Type="application/json")
    elif path.startswith(f"/me/vit/resolve/{COMMIT}/") and name in files:
      tag = hashlib.sha1(files[name]).hexdigest()
      send(handler, files[name], X_Repo_Commit=COMMIT, ETag=f'"{tag}"')
    else:
      send(handler, b"", 404)

  def load(host, *names):
    env = os.environ | {"HF_ENDPOINT": host, "HF_HOME": str(tmp_path / "hub")}
    code = "\n".join(line[2:] for line in HUB.splitlines())
    out = subprocess.run(
      [sys.executable, "-c", code, *names],
      env=env,
      capture_output=True,
      text=True,
    )
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
  assert sorted(p.name for p in tmp_path.iterdir()) == names[:2]

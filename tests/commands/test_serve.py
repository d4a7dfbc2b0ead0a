"""The page to try a model on: its answers, its limits, and it in a browser."""

import contextlib
import io
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from data import kinds
from PIL import Image

import vit_jax
from vit_jax.tools import serve
from vit_jax.tools.exporting.convert import without_head

DATA = pathlib.Path(__file__).parents[1] / "data"
COMMAND = [
  *(sys.executable, "-u", "-m", "vit_jax", "serve"),
  str(DATA / "vit_token.weights.npz"),
]
BROWSER = next(
  filter(
    None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))
  ),
  None,
)


def encoded(kind="png", size=(40, 30)) -> bytes:
  pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3))
  return kinds.encoded(Image.fromarray(pixels.astype(np.uint8)), kind)


def bomb(width: int, height: int) -> bytes:
  """A PNG of a few bytes whose header states any size."""
  return kinds.png(width, height, 8, 2, zlib.compress(bytes(1000)))


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(DATA / "vit_token.weights.npz", verbose=False)


@pytest.fixture(scope="module")
def classifier(vit):
  return serve.ImageClassifier(vit, top=3, max_bytes=100_000, max_pixels=10_000)


@contextlib.contextmanager
def connected(classifier, host="127.0.0.1"):
  """A client of the page that listens at a host."""
  testclient = pytest.importorskip("starlette.testclient")
  app = serve.application(classifier, "tiny", serve.names_of(host))
  written = f"[{host}]" if ":" in host else host
  with testclient.TestClient(app, f"http://{written}:8000") as client:
    yield client


@pytest.fixture
def client(classifier):
  with connected(classifier) as client:
    yield client


def test_the_page_and_its_answers(vit, client):
  page = client.get("/")
  assert page.status_code == 200
  assert "default-src 'self'" in page.headers["content-security-policy"]
  for name in re.findall(r'(?:href|src)="(page\.\w+)"', page.text):
    assert client.get(f"/{name}").status_code == 200
  model = client.get("/model").json()
  assert (model["name"], model["max_bytes"]) == ("tiny", 100_000)
  data = encoded()
  answer = client.post("/predict", content=data).json()
  (expected,) = vit.predict(Image.open(io.BytesIO(data)), top=3)
  assert answer["size"] == [40, 30]
  assert answer["classes"] == [
    {"name": p.name, "probability": p.probability} for p in expected
  ]
  assert answer["attention"].startswith("data:image/png;base64,")
  for path in ("/predict", "/../serve.py", "/%2e%2e/page.py"):
    assert client.get(path).status_code == 404


HOSTILE = {
  "empty": (b"", 415),
  "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 415),
  "half": (encoded("jpeg")[:900], 415),
  "bomb": (bomb(30_000, 30_000), 413),
  "thin": (bomb(1, 10_001), 413),
  "no data": (bomb(90, 90), 415),
  "large": (bytes(100_001), 413),
}
TEXTS = {413: "at most", 415: "cannot be decoded"}


def test_hostile_files_are_refused(client):
  for name, (data, status) in HOSTILE.items():
    answer = client.post("/predict", content=data)
    assert answer.status_code == status, name
    assert TEXTS[status] in answer.json()["error"], name
  stream = (bytes(1000) for _ in range(200))  # of no stated length
  assert client.post("/predict", content=stream).status_code == 413


def test_other_pages_cannot_reach_it(client):
  data = encoded()
  for origin in (
    "https://example.org",
    "null",
    "http://[::1",
    "ftp://127.0.0.1:8000",
  ):
    other = client.post("/predict", content=data, headers={"Origin": origin})
    assert other.status_code == 403
  own = {"Origin": "http://127.0.0.1:8000"}
  assert client.post("/predict", content=data, headers=own).status_code == 200


@pytest.mark.parametrize(
  "host, is_local",
  [
    *(("localhost", True), ("::1", True)),
    *(("0.0.0.0", False), ("example.org", False)),
  ],
)
def test_names_of_this_machine(classifier, host, is_local):
  """Whoever listens for this machine alone is asked by its names alone."""
  with connected(classifier, host) as client:
    assert client.get("/model").status_code == 200
    evil = client.get("/model", headers={"Host": "evil.example"})
    assert evil.status_code == (400 if is_local else 200)


def test_what_a_model_cannot_answer(vit, classifier, monkeypatch, capsys):
  """It fails, has no attention, or no head."""

  def fails(*_, **__):
    raise MemoryError

  with connected(classifier) as client, monkeypatch.context() as patch:
    patch.setitem(vars(vit), "probabilities", fails)
    answer = client.post("/predict", content=encoded())
    assert answer.status_code == 500
    assert "MemoryError" in answer.json()["error"]
    assert "MemoryError" in capsys.readouterr().err
  bare = without_head(vit, "npz")
  with pytest.raises(ValueError, match="without a head"):
    serve.ImageClassifier(bare, 3, 1, 1)
  bit = vit_jax.load(DATA / "bit_v2.weights.npz", image_size=32, verbose=False)
  monkeypatch.setitem(
    vars(bit), "probabilities", lambda _, x: jnp.full((len(x), 11), 1 / 11)
  )
  answer = serve.ImageClassifier(bit, 3, 10**6, 10**6).answer(encoded())
  assert answer["attention"] is None
  assert "attention" in answer["attention_is"]


@pytest.mark.slow
def test_its_port_is_its_own_and_it_ends_quietly_while_an_upload_stalls():
  pytest.importorskip("uvicorn")
  with served() as (page, process):
    host, port = page.removeprefix("http://").split(":")
    other = subprocess.run(
      [*COMMAND, f"--port={port}"], capture_output=True, text=True
    )
    assert other.returncode == 1 and "Traceback" not in other.stderr
    assert f"--port: {port}" in other.stderr
    with socket.create_connection((host, int(port))) as stalled:
      stalled.sendall(
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Length: 5000\r\n\r\nabc"
      )
      time.sleep(0.5)
      process.send_signal(signal.SIGINT)
      _, errors = process.communicate(timeout=serve.END_SECONDS + 20)
  assert "Warning" not in errors and "Traceback" not in errors, errors


@contextlib.contextmanager
def served(*flags):
  process = subprocess.Popen(
    [*COMMAND, "--port=0", *flags],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  lines = []
  try:
    for line in process.stdout:
      lines.append(line)
      if answer := re.search(r"http://\S+", line):
        yield answer[0], process
        break
    else:
      raise AssertionError("".join(lines) + process.stderr.read())
  finally:
    process.terminate()
    process.communicate(timeout=30)


def until(is_so, seconds=30):
  """Waits; the page's own policy forbids the browser to evaluate texts."""
  deadline = time.monotonic() + seconds
  while not is_so():
    assert time.monotonic() < deadline
    time.sleep(0.02)


DROP = """async (files) => {
  const data = new DataTransfer();
  for (const [name, bytes] of files)
    data.items.add(new File([new Uint8Array(bytes)], name));
  const options = { dataTransfer: data, bubbles: true, cancelable: true };
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", options));
}"""


@pytest.mark.nightly
def test_in_a_browser(vit, tmp_path):
  """A real file is dropped, its answer read; then hostile ones."""
  playwright = pytest.importorskip("playwright.sync_api")
  if BROWSER is None:
    pytest.skip("no Chromium on this machine")
  image, script = encoded("jpeg", (160, 120)), b"<script>alert(1)</script>"
  (tmp_path / "photo.jpg").write_bytes(image)
  (expected,) = vit.predict(tmp_path / "photo.jpg")
  with (
    served("--max_megabytes=1", "--max_megapixels=1") as (address, process),
    playwright.sync_playwright() as p,
  ):
    browser = p.chromium.launch(
      executable_path=BROWSER, args=["--no-sandbox"], headless=True
    )
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("dialog", lambda d: errors.append(f"dialog: {d.message}"))
    page.goto(address)
    status, size = page.locator("#status"), page.locator("#size")

    def drop(name, data, *more):
      files = [(name, data), *more]
      page.evaluate(DROP, [[n, list(d)] for n, d in files])  # says so before
      until(lambda: not status.inner_text().startswith("Looking"))
      return status.inner_text()

    drop("photo.jpg", image)
    names = page.locator("#classes b").all_inner_texts()
    chances = page.locator("#classes span").all_inner_texts()
    assert names == [e.name for e in expected]
    assert chances == [f"{100 * e.probability:.1f} %" for e in expected]
    for shown in ("image", "attention"):
      width = f"document.getElementById('{shown}').naturalWidth"
      assert page.evaluate(width)
    for name, data, word in (
      ("a.jpg", script, "decoded"),
      ("bomb.png", bomb(30_000, 30_000), "too many pixels"),
      ("large.png", bytes(1_100_000), "1.1 MB"),
    ):
      assert word in drop(name, data)
    # A name is text, whatever it says.
    evil = "<img src=x onerror=alert(1)>.jpg"
    drop(evil, image)
    assert size.inner_text() == f"{evil}, 160 x 120"
    # Several at once: a line for each, which shows its answer.
    two = encoded("png", (50, 40))
    text = drop("a.jpg", image, ("b.jpg", script), ("c.png", two))
    assert "2 of 3 images" in text
    page.locator("#files li").nth(2).locator("button").click()
    assert size.inner_text() == "c.png, 50 x 40"
    # The other way in: the field for files.
    page.set_input_files("#file", tmp_path / "photo.jpg")
    until(lambda: size.inner_text().startswith("photo.jpg"))
    process.terminate()
    process.wait(timeout=30)
    assert drop("photo.jpg", image).startswith("No answer")
    browser.close()
  assert not errors

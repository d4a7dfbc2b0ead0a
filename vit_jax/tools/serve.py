"""A page to try a model: drop an image, see its classes and the attention.

Only this machine can open the page, unless --host allows others. Images are not
stored.
"""

import argparse
import asyncio
import base64
import concurrent.futures
import contextlib
import io
import ipaddress
import pathlib
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.batch import normalise
from vit_jax.data import images as images_lib
from vit_jax.data import pixels
from vit_jax.data.preprocessing import decoding
from vit_jax.distributed import processes
from vit_jax.inference import overlay
from vit_jax.inference.pretrained import Pretrained, Value, load
from vit_jax.options import not_installed

# Those that browsers show.
FORMATS = tuple(f for f in images_lib.FORMATS if f not in ("TIFF", "PPM"))
PAGE = pathlib.Path(__file__).parent / "try_page"
# The first header allows the page to run only its own code.
HEADERS = {
  "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:;"
  " frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "no-referrer",
  "Cache-Control": "no-store",
}
END_SECONDS = 5  # after Ctrl-C, to finish running requests
MAX_CONNECTIONS = 16  # each may upload max_megabytes
MEANING = (
  "what the model got, brighter where its attention goes (rollout);"
  f" {overlay.SCALE}"
)
NEEDS = ("starlette", "uvicorn")


class Refused(Exception):
  """A refused request, with an HTTP status and the reason."""

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


class ImageClassifier:
  """A model, with limits of the images that it classifies.

  Args:
    vit: The model; it needs a head.
    top: Number of classes in an answer.
    max_bytes: Largest size of a file.
    max_pixels: Largest height x width of an image, as its header states them.

  Raises:
    ValueError: The model has no head.
  """

  def __init__(
    self, vit: Pretrained, top: int, max_bytes: int, max_pixels: int
  ):
    if not vit.num_classes:
      raise ValueError("got a model without a head, expected one with classes.")
    self.vit, self.top = vit, min(top, vit.num_classes)
    self.max_bytes, self.max_pixels = max_bytes, max_pixels

  def model(self, name: str) -> dict[str, Any]:
    """Returns the description of the model on the page, as JSON values."""
    height, width = self.vit.image_size
    what = "numbers" if self.vit.is_regression else "classes"
    return {
      "name": name,
      "text": f"{name}: {self.vit.num_classes:,} {what}, images of"
      f" {height} x {width} pixels",
      "max_bytes": self.max_bytes,
    }

  def answer(self, data: bytes) -> dict[str, Any]:
    """Returns the classes of an image, and its attention as a PNG.

    The EXIF orientation is applied, so that the model gets what the page shows.

    Args:
      data: The bytes of a file.

    Raises:
      Refused: The file is no image of `FORMATS`, is broken, or is too large.
    """
    start = time.perf_counter()
    opened = self._opened(data)
    try:
      image = images_lib.read(opened, **decoding(self.vit.ops))
      (classes,) = self.vit.predict(image, top=self.top)
    except ValueError as e:  # pixels of a kind that training does not have
      raise Refused(422, str(e)) from None
    attention, meaning = self._attention(image)
    return {
      "size": [image.shape[1], image.shape[0]],
      "classes": [
        {"name": p.name, "value": p.value}
        if isinstance(p, Value)
        else {"name": p.name, "probability": p.probability}
        for p in classes
      ],
      "attention": attention,
      "attention_is": meaning,
      "seconds": round(time.perf_counter() - start, 3),
    }

  def _opened(self, data: bytes) -> Image.Image:
    """Returns the decoded image, without its EXIF orientation applied."""
    try:
      image = Image.open(io.BytesIO(data), formats=FORMATS)
      if image.width * image.height > self.max_pixels:  # nothing is decoded yet
        raise Image.DecompressionBombError  # as Pillow, at a higher limit
      image.load()
      return image
    except Image.DecompressionBombError:
      most = f"at most {self.max_pixels / 1e6:,g} million"
      raise Refused(413, f"got too many pixels, expected {most}.") from None
    except Exception:  # Pillow raises many kinds for a broken file
      kinds = " or ".join(FORMATS)
      text = f"got a file that cannot be decoded, expected {kinds}."
      raise Refused(415, text) from None

  def _attention(self, image: np.ndarray) -> tuple[str | None, str]:
    """Returns a data URL and a caption; or None and why there is none."""
    image = pixels.apply(image, self.vit.ops)
    try:
      (attention,) = self.vit.attention_map(normalise(image[None]))
    except ValueError as e:
      return None, str(e)
    image = overlay.enlarged(image)
    buffer = io.BytesIO()
    Image.fromarray(overlay.lit(image, attention)).save(buffer, "PNG")
    link = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/png;base64,{link}", MEANING


def application(classifier: ImageClassifier, name: str, hosts: list[str]):
  """Returns the ASGI application of the page.

  Routes: / is the page; /model describes the model; /predict takes the bytes of
  an image (POST) and returns JSON, {"error": text} if the image is refused.

  Args:
    classifier: The model and its limits.
    name: Name of the model on the page.
    hosts: Host names that a request may have; ["*"]: any. They keep a page
      elsewhere from reaching a local model through a name of its own.
  """
  from starlette.applications import Starlette
  from starlette.middleware import Middleware
  from starlette.middleware.trustedhost import TrustedHostMiddleware
  from starlette.requests import ClientDisconnect, Request
  from starlette.responses import JSONResponse, Response
  from starlette.routing import Mount, Route
  from starlette.staticfiles import StaticFiles

  # One thread decodes all images: the C library reserves memory that a thread
  # has freed, up to 0.7 GB for a large image, for the same thread.
  worker = concurrent.futures.ThreadPoolExecutor(1)

  async def body(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
      data += part
      if len(data) > classifier.max_bytes:
        most = f"{classifier.max_bytes / 1e6:,g} MB"
        raise Refused(413, f"got a larger file, expected at most {most}.")
    return bytes(data)

  async def predict(request: Request) -> Response:
    origin, host = map(request.headers.get, ("origin", "host"))
    try:
      if origin and origin not in (f"http://{host}", f"https://{host}"):
        raise Refused(403, f"got a request from {origin}, expected this page.")
      data = await body(request)
      loop = asyncio.get_running_loop()
      return JSONResponse(
        await loop.run_in_executor(worker, classifier.answer, data)
      )
    except Refused as e:
      return JSONResponse({"error": str(e)}, e.status)
    except ClientDisconnect:
      return Response(status_code=400)
    except asyncio.CancelledError:  # by uvicorn, END_SECONDS after Ctrl-C
      return Response(status_code=503)
    except Exception as e:  # such as too little memory; the page shows it
      traceback.print_exc()
      text = f"the model failed ({type(e).__name__}); see its terminal."
      return JSONResponse({"error": text}, 500)

  async def model(request: Request) -> Response:
    return JSONResponse(classifier.model(name))

  class AddHeaders:
    """Adds `HEADERS` to every response.

    (Starlette's BaseHTTPMiddleware prints a traceback on Ctrl-C in an upload.)
    """

    def __init__(self, app):
      self.app = app

    async def __call__(self, scope, receive, send):
      async def send_with_headers(message):
        if message["type"] == "http.response.start":
          more = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
          message["headers"] = [*message["headers"], *more]
        await send(message)

      await self.app(scope, receive, send_with_headers)

  return Starlette(
    routes=[
      Route("/predict", predict, methods=["POST"]),
      Route("/model", model),
      Mount("/", StaticFiles(directory=PAGE, html=True)),
    ],
    middleware=[
      Middleware(AddHeaders),
      Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
    ],
  )


def names_of(host: str) -> list[str]:
  """Returns the host names that requests may have; ["*"]: any.

  If only this machine can connect, a request must have a name of this machine.
  Otherwise a page elsewhere could reach the server through a name that resolves
  to this machine.

  Args:
    host: Address to listen at.
  """
  try:
    is_local = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_local = host == "localhost"
  if not is_local:
    return ["*"]
  return ["localhost", "127.0.0.1", f"[{host}]" if ":" in host else host]


def main(args: argparse.Namespace) -> None:
  """Loads and compiles the model, and serves the page until Ctrl-C."""
  if error := not_installed(NEEDS, "serve"):
    sys.exit(error)
  processes.refuse_several_hosts()
  warnings.filterwarnings("ignore", module="PIL")  # the answer has the error
  import uvicorn

  try:
    vit = load(args.checkpoint)
    classifier = ImageClassifier(
      vit,
      args.top,
      round(args.max_megabytes * 1e6),
      round(args.max_megapixels * 1e6),
    )
  except (OSError, ValueError) as e:
    sys.exit(str(e))
  blank = io.BytesIO()
  Image.new("RGB", (64, 64)).save(blank, "PNG")
  # It compiles, so that the first image is quick.
  classifier.answer(blank.getvalue())
  hosts = names_of(args.host)
  name = pathlib.PurePath(args.checkpoint).name
  config = uvicorn.Config(
    application(classifier, name, hosts),
    host=args.host,
    port=args.port,
    log_level="warning",
    limit_concurrency=MAX_CONNECTIONS,
    server_header=False,
    timeout_graceful_shutdown=END_SECONDS,
  )
  try:
    listening = config.bind_socket()
  except SystemExit:
    sys.exit(
      f"--port: {args.port} of {args.host} cannot be opened; is it in use?"
      " --port=0 takes a free one."
    )
  listening.listen()  # uvicorn does a moment after the address is printed
  port = listening.getsockname()[1]
  where = f"[{args.host}]" if ":" in args.host else args.host
  reach = (
    "any machine that can connect" if "*" in hosts else "this machine only"
  )
  print(f"page            http://{where}:{port} ({reach}); Ctrl-C ends it")
  sys.stdout.flush()
  with contextlib.suppress(KeyboardInterrupt):  # the end that was announced
    uvicorn.Server(config).run(sockets=[listening])

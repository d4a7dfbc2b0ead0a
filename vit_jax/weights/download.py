"""Downloads weights by address or name, once; otherwise says how to get them.

pooch downloads `https://...`, and huggingface_hub `hf-hub:OWNER/NAME`. Each has
its own cache. The buckets of the published files are public, so
`gs://vit_models/...` is downloaded by https, without an account.
"""

import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Iterator

from etils import epath

from vit_jax import paths
from vit_jax.families import PUBLISHED, by_variant, published

HUB = "hf-hub:"
FILES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
HUB_FILES = (
  "config.json",
  "preprocessor_config.json",
  "processor_config.json",
  "model*.safetensors",
  "model.safetensors.index.json",
  "adapter_config.json",
  "adapter_model.safetensors",
)


def is_remote(path: str | os.PathLike) -> bool:
  """Whether `local` would have to download this path."""
  return _url(str(path)) is not None or str(path).startswith(HUB)


def local(path: str | os.PathLike) -> epath.Path:
  """Returns the path of the file or folder, after a download if necessary.

  Args:
    path: A path on disk or in a bucket, which is returned unchanged; an address
      (https://, http://, gs:// of a published file); or
      hf-hub:OWNER/NAME[@REVISION].

  Raises:
    FileNotFoundError: The download failed; the message says what to do.
    ValueError: It is the name of a model.
  """
  text = str(path)
  if text.startswith(HUB):
    return epath.Path(_from_hub(text))
  if url := _url(text):
    return epath.Path(_from_web(url))
  file = epath.Path(path).expanduser()
  name = text.removeprefix("ViT-").replace("_", "/")
  if not text.startswith("gs://") and not file.exists() and _is_model(name):
    raise ValueError(_choices(text, PUBLISHED.get(name, ())))
  return file


def pinned(path: str) -> str:
  """Returns an address with the commit of the hub that was downloaded.

  Other paths and addresses are returned unchanged.

  Args:
    path: A path or address that `local` has downloaded.
  """
  if not path.startswith(HUB):
    return path
  import huggingface_hub

  name, _, revision = path.removeprefix(HUB).partition("@")
  folder = huggingface_hub.snapshot_download(
    name,
    revision=revision or None,
    allow_patterns=HUB_FILES,
    local_files_only=True,
  )
  return f"{HUB}{name}@{pathlib.Path(folder).name}"


def cached(url: str) -> pathlib.Path:
  """Returns the cache file of an address: its hash, and its file name."""
  import pooch  # here and below, because the import takes a while

  return paths.cache_folder("weights") / pooch.utils.unique_file_name(url)


def _url(text: str) -> str | None:
  if re.match("https?://", text):
    return text
  return published.https(text) if text.startswith(published.BUCKETS) else None


def _is_model(text: str) -> bool:
  return not any(by_variant(text).errors())


def _from_web(url: str) -> pathlib.Path:
  """Downloads to a file beside the final one, and renames it when complete."""
  import pooch
  import requests

  file = cached(url)
  if file.exists():
    return file
  pooch.get_logger().setLevel("WARNING")
  try:
    with _one_at_a_time(file.parent):
      if file.exists():  # another process has fetched it meanwhile
        return file
      print(f"downloading     {url}\n{'':<16}to {file}", file=sys.stderr)
      pooch.retrieve(
        url,
        known_hash=None,  # no hashes are published
        fname=file.name,
        path=file.parent,
        downloader=pooch.HTTPDownloader(
          progressbar=sys.stderr.isatty(), chunk_size=2**20
        ),
      )
  except (requests.RequestException, OSError) as e:
    reason = f"got {url!r}, which cannot be downloaded: {_reason(e)}"
    raise FileNotFoundError(f"{reason}; or put it at {file}.") from None
  return file


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
  """Lets only one process of this host at a time enter the block."""
  try:
    import fcntl  # of Unix
  except ImportError:
    yield
    return
  folder.mkdir(parents=True, exist_ok=True)
  handle = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)


def _reason(error: Exception) -> str:
  """Returns the innermost cause, which explains the error."""
  for inner in (getattr(error, "reason", None), *error.args):
    if isinstance(inner, Exception):
      return _reason(inner)
  return str(error).strip() or type(error).__name__


def _from_hub(text: str) -> str:
  name, _, revision = text.removeprefix(HUB).partition("@")
  import huggingface_hub

  try:
    folder = huggingface_hub.snapshot_download(
      name, revision=revision or None, allow_patterns=HUB_FILES
    )
  except (OSError, ValueError) as e:
    reason = _reason(e).splitlines()[0]
    raise FileNotFoundError(
      f"got {text!r}, which cannot be downloaded: {reason}; or download the"
      " files of the model on another machine, and give their folder."
    ) from None
  if not list(pathlib.Path(folder).glob("*model*.safetensors")):
    raise FileNotFoundError(
      f"got {text!r}, which has no model.safetensors; download its"
      " pytorch_model.bin and config.json, and give their folder."
    )
  return folder


def hub_hint(path: str | os.PathLike) -> str:
  """Returns a question for the name of a hub's model without "hf-hub:", or "".

  Args:
    path: A path that does not exist. The name of a published model may lack
      owner and tag. Other names are OWNER/NAME, without such a folder OWNER.

  Example:
    >>> hub_hint("vit_small_patch16_224")
    " Did you mean 'hf-hub:timm/vit_small_patch16_224.augreg_in1k'?"
  """
  text, files = str(path), [f for fs in PUBLISHED.values() for f in fs]
  known = [a for f in files for a in published.addresses(f)]
  known = sorted(a.removeprefix(HUB) for a in known if a.startswith(HUB))
  start = re.compile(rf"([\w-]+/)?{re.escape(text)}(\.|$)")
  found = [name for name in known if start.match(name)]
  is_name = re.fullmatch(r"[\w-]+/[\w.-]+", text) and not text.endswith(FILES)
  if not found and is_name and not os.path.exists(os.path.dirname(text)):
    found = [text]
  return f" Did you mean {HUB + found[0]!r}?" if found else ""


def _choices(name: str, files: tuple[str, ...]) -> str:
  """Returns the published files of a model, each as a value of `path`."""
  lines = [f"\n  {a}" for f in files for a in published.addresses(f)]
  which = f", or a published file:{''.join(lines)}" if lines else "."
  return f"got the model {name!r}, expected the path of its weights{which}"

"""Uploads a folder to Hugging Face's hub; needs huggingface_hub and a token."""

import os
import re

from vit_jax.options import not_installed

PACKAGE = "huggingface_hub"


def check(name: str) -> None:
  """Raises ValueError unless a folder could be uploaded under this name.

  Args:
    name: OWNER/NAME.

  Raises:
    ValueError: The name is no such name, the library is not installed, or there
      is no token.
  """
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    raise ValueError(f"--push: got {name!r}, expected OWNER/NAME.")
  if not_installed([PACKAGE], ""):
    raise ValueError(
      f"--push: got no {PACKAGE}, expected it installed: pip install {PACKAGE}."
    )
  import huggingface_hub

  if huggingface_hub.get_token() is None:
    raise ValueError(
      "--push: got no token, expected one: `hf auth login`, or set HF_TOKEN. It"
      " must allow writing; https://huggingface.co/settings/tokens makes one."
    )


def push(folder: str | os.PathLike, name: str) -> str:
  """Uploads all files of a folder as one commit, and returns the address.

  A repository that does not exist is created, private; one that exists keeps
  its visibility and its other files.

  Args:
    folder: A local folder.
    name: OWNER/NAME.

  Raises:
    ValueError: The hub or the network refused; the message says what to do.
  """
  import huggingface_hub
  from huggingface_hub.errors import HfHubHTTPError

  api = huggingface_hub.HfApi()
  try:
    url = api.create_repo(name, private=True, exist_ok=True)
    api.upload_folder(
      repo_id=name,
      folder_path=os.fspath(folder),
      commit_message="Written by vit_jax",
    )
  except Exception as e:  # its HTTP library has errors of its own
    status = e.response.status_code if isinstance(e, HfHubHTTPError) else None
    advice = {
      401: "The token is not valid: `hf auth login`, or another HF_TOKEN.",
      403: f"The token may not write to {name}: take one that may, or a name of"
      " your own.",
    }.get(status, "Is the network there?" if status is None else "")
    reason = str(e).strip().splitlines() or [type(e).__name__]
    raise ValueError(
      f"--push: {name} was not uploaded: {reason[0].rstrip('.')}."
      f" {advice}".rstrip()
      + f" {folder} is complete: upload it later with `hf upload {name}"
      f" {folder}`."
    ) from None
  return str(url)

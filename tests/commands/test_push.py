"""Uploads to Hugging Face's hub, and what it may refuse."""

import pathlib
import shutil
from unittest import mock

import huggingface_hub
import pytest

from vit_jax.commands import convert as convert_command
from vit_jax.tools.exporting import convert

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_token.weights.npz"


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A stand-in for `HfApi` with its signatures; `hub.files` has uploads."""
  hub = mock.create_autospec(huggingface_hub.HfApi, instance=True)
  hub.files = tmp_path / "hub"
  hub.create_repo.return_value = "https://hub/me/vit"
  hub.upload_folder.side_effect = lambda repo_id, folder_path, **_: (
    shutil.copytree(folder_path, hub.files / repo_id)
  )
  monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
  return hub


@pytest.mark.slow
def test_a_converted_folder_is_uploaded(tmp_path, hub, capsys):
  folder = tmp_path / "vit"
  convert_command.main([str(TOKEN), str(folder), "--to=hf", "--push=me/vit"])
  assert f"{'':<16}uploaded to https://hub/me/vit" in capsys.readouterr().out
  hub.create_repo.assert_called_once_with("me/vit", private=True, exist_ok=True)
  contents = lambda path: {p.name: p.read_bytes() for p in path.iterdir()}
  files = contents(hub.files / "me" / "vit")
  assert files == contents(folder)
  assert set(files) == {
    "README.md",
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
  }
  assert b"vit_jax.load('hf-hub:me/vit')" in files["README.md"]


def test_what_the_hub_refuses(tmp_path, hub):
  response = mock.Mock(status_code=403, headers={})
  hub.create_repo.side_effect = huggingface_hub.errors.HfHubHTTPError(
    "no rights.", response=response
  )
  with pytest.raises(ValueError, match="(?s)no rights.*hf upload me/vit") as e:
    convert.push(tmp_path, "me/vit")
  assert "secret" not in str(e.value)
  hub.upload_folder.assert_not_called()


def test_the_name_and_the_login_are_checked_first(tmp_path, monkeypatch):
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
  argv = ["none.npz", str(tmp_path / "x"), "--to=hf", "--push=me/vit"]
  with pytest.raises(SystemExit, match="`hf auth login`"):
    convert_command.main(argv)
  with pytest.raises(ValueError, match="expected OWNER/NAME"):
    convert.check_push("a/b/c")

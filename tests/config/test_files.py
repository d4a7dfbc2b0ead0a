"""Config files by path and by name."""

import pathlib

import pytest

from vit_jax.config import cli, config_files, freeze

ROOT = pathlib.Path(__file__).parents[2]
MINE = """from vit_jax.config import recipe


def get_config(dataset="imagenet21k"):
  c = recipe(f"vit:B/16,{dataset}")
  c.seed = 7
  return c
"""


def test_a_name_or_path_and_its_argument():
  for source, *expected in (
    ("vit_b16", "vit_b16", ""),
    ("finetune:init=/a/b.py:x,model=B/16", "finetune",
     "init=/a/b.py:x,model=B/16"),
    ("configs/a.py:x=gs://b", "configs/a.py", "x=gs://b"),
    ("/data/a:b/c.py:d:e", "/data/a:b/c.py", "d:e"),
    ("", "", ""),
  ):  # fmt: skip
    assert config_files.split(source) == tuple(expected)


def test_a_name_is_that_of_a_known_config_but_the_folder_comes_first(
  tmp_path, monkeypatch
):
  def read(name, argument=""):
    args = cli.parse("train", {}, [f"--config={name}{argument}"])
    assert not args.errors
    return args

  monkeypatch.chdir(tmp_path)
  for name in ("vit_b16", "vit_b16.py", "configs/vit_b16.py"):
    assert config_files.find(name) == ROOT / "configs" / "vit_b16.py"
  args = read("vit_b16", ":imagenet21k")
  assert args.config_name == "vit_b16"
  assert args.config.data.dataset == "imagenet21k"
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "vit_b16.py").write_text(MINE)
  for name in ("vit_b16", "vit_b16.py", "configs/vit_b16.py"):
    assert read(name).config.seed == 7 and read(name).config_name == "vit_b16"
  (tmp_path / "vit_b16.py").write_text(MINE.replace("7", "8"))
  for name in ("vit_b16", "./vit_b16", f"{tmp_path}/vit_b16.py"):
    assert read(name).config.seed == 8


def test_what_there_is_not(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(MINE)
  for name, words in {
    "vit_b61": "Did you mean 'vit_b16'?",
    "elsewhere/vit_b16.py": "one of ablation, ",
    "zzz": "one of ablation, ",
    "mine.yaml": "Did you mean 'mine.py'?",
    "": "a Python file",
  }.items():
    with pytest.raises(ValueError) as e:
      config_files.find(name)
    assert f"--config: got {name!r}, " in str(e.value) and words in str(e.value)


def test_the_length_that_is_named_counts():
  """The config's own is in steps, which else decide over epochs."""

  def length(*flags):
    args = cli.parse("train", {}, ["--config=digits_finetune", *flags])
    config = args.config
    return config.total_steps, config.total_epochs, args.errors

  assert length() == (300, None, [])
  assert length("--config.total_steps=7")[:2] == (7, None)
  assert length("--config.total_epochs=2")[:2] == (None, 2.0)
  assert length("--config.total_epochs=none") == (300, None, [])
  _, _, errors = length("--config.total_epochs=2", "--config.total_steps=7")
  assert errors[0].startswith("--config.total_epochs: got both")


def test_what_a_file_returns(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("def get_config():\n  c = {}\n")
  with pytest.raises(ValueError) as e:
    config_files.call(str(path))
  assert str(e.value).startswith(f"--config={path}: get_config: got None")
  path.write_text(
    "import ml_collections\n\n\ndef get_config():\n"
    "  return ml_collections.ConfigDict({'optim': {'lr': 0.5}, 'seed': 7})\n"
  )
  config = freeze(config_files.call(str(path)))
  assert (config.seed, config.optim.lr) == (7, 0.5)

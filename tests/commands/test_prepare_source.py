"""`vit-jax prepare`: ImageNet from tars, and data of one's own."""

import numpy as np
import pytest
import tensorflow_datasets as tfds
from data.importable import encoded, stored, tar_of

from vit_jax.commands import prepare
from vit_jax.data import sources
from vit_jax.data.builders import embedded

WNIDS = ("n01440764", "n01443537", "n15075141")


def class_tars(count=4):
  """{name of the tar: its bytes}, and {image: class}."""
  tars, classes = {}, {}
  for i, wnid in enumerate(WNIDS):
    pictures = {f"{wnid}_{j}.JPEG": encoded(100 * i + j) for j in range(count)}
    tars[f"{wnid}.tar"] = tar_of(pictures.items())
    classes |= dict.fromkeys(pictures.values(), wnid)
  return tars, classes


def write(folder, tars):
  folder.mkdir(parents=True, exist_ok=True)
  for name, data in tars.items():
    (folder / name).write_bytes(data)


def run(*arguments):
  """The command, in this process."""
  prepare.main(list(map(str, arguments)))


def error(*arguments):
  with pytest.raises(SystemExit) as e:
    run(*arguments)
  return str(e.value)


@pytest.mark.parametrize("is_nested", [False, True])
def test_imagenet21k_from_class_tars(is_nested, tmp_path, capsys):
  tars, classes = class_tars()
  if is_nested:
    whole = {f"fall11/{name}": data for name, data in tars.items()}
    tars = {"fall11_whole.tar": tar_of(whole.items())}
  out = tmp_path / "out"
  write(tmp_path / "tars", tars)
  given = f"--manual_dir={tmp_path / 'tars'}", f"--data_dir={out}"
  run("imagenet21k", *given)
  said = capsys.readouterr().out
  assert "12 records" in said
  assert "--config.data.dataset=imagenet21k --config.data.data_" in said
  assert stored("imagenet21k", "full", out) == classes
  source = sources.open_source("imagenet21k", "full[3:]", str(out))
  assert source.class_names == WNIDS and source.num_examples == 9
  # Neighbours are not of a class: the slices of a recipe have all of them.
  assert len({*source.labels()[:6]}) > 1
  assert list(out.glob("imagenet21k/1.0.0/*.array_record*"))
  run("imagenet21k", *given)
  assert "nothing to do" in capsys.readouterr().out


def test_broken_members_of_imagenet21k_are_named(tmp_path, capsys):
  tars, classes = class_tars()
  whole = encoded(7)
  broken = {
    "n02000000_0.JPEG": whole,
    "n02000000_1.JPEG": whole[:-40],
    "n02000000_2.JPEG": b"404",
  }
  twice = ("n02000000_0.JPEG", encoded(8))
  tars["n02000000.tar"] = tar_of([*broken.items(), twice])
  cut = tar_of((f"n02000001_{i}.JPEG", encoded(900 + i)) for i in range(3))
  tars |= {"n02000001.tar": cut[:3000], "n02000002.tar": b""}
  tars |= {"n02000003.tar": tar_of([]), "README.tar": b"no class"}
  write(tmp_path / "tars" / "deeper", tars)
  out = tmp_path / "out"
  where = "--manual_dir", tmp_path / "tars", "--data_dir", out
  run("imagenet21k", *where)
  # The classes are those of the names, images or not.
  source = sources.open_source("imagenet21k", "full", str(out))
  extra = tuple(f"n0200000{i}" for i in range(4))
  assert source.class_names == (*WNIDS[:2], *extra, WNIDS[2])
  assert classes.items() < stored("imagenet21k", "full", out).items()
  lines = (out / "imagenet21k/1.0.0/left_out.txt").read_text().splitlines()
  said = capsys.readouterr().out
  assert all(line in said for line in lines)
  errors = dict(line.split(": ", 1) for line in lines)
  for name, word in {
    "n02000000/n02000000_0.JPEG": "twice",
    "n02000000/n02000000_1.JPEG": "truncated",
    "n02000000/n02000000_2.JPEG": "3 bytes",
    "n02000001.tar": "broken after",
    "n02000002.tar": "broken after 0 images",
  }.items():
    assert word in errors.pop(name)
  assert not errors
  # A tar that is there twice.
  write(tmp_path / "tars", {"n01440764.tar": tars["n01440764.tar"]})
  text = error("imagenet21k", *where[:3], tmp_path / "other")
  assert "expected one tar of n01440764" in text


def test_imagenet2012_by_tfds_from_the_two_tars(tmp_path):
  """Its class names and the labels of its validation images are TFDS's."""
  class_files, classes = class_tars()
  pictures = {
    f"ILSVRC2012_val_0000000{i}.JPEG": encoded(i + 50) for i in (2, 1, 3)
  }
  tars, out = tmp_path / "tars", tmp_path / "out"
  write(tars, {"ILSVRC2012_img_train.tar": tar_of(class_files.items())})
  arguments = ("imagenet2012", "--manual_dir", tars, "--data_dir", out)
  write(tars, {"ILSVRC2012_img_val.tar": tar_of(pictures.items())})
  run(*arguments)
  assert stored("imagenet2012", "train", out) == classes
  names = sources.open_source("imagenet2012", "train", str(out)).class_names
  assert (len(names), names[0], names[-1]) == (1000, WNIDS[0], WNIDS[2])
  # The first labels of the validation set are 490, 361 and 171 in the numbers
  # of the challenge's kit, which has an order of its own.
  assert stored("imagenet2012", "validation", out) == {
    pictures[f"ILSVRC2012_val_0000000{i}.JPEG"]: wnid
    for i, wnid in enumerate(("n01751748", "n09193705", "n02105855"), 1)
  }
  assert list(out.glob("imagenet2012/*/*.array_record*"))


def test_an_import_says_what_there_is_and_what_not(tmp_path, capsys):
  """Twelve images to train on and five others, one of them broken."""
  for split, count in (("train", 12), ("val", 4)):
    for i in range(count):
      write(tmp_path / "in" / split / "ab"[i % 2], {f"{i}.jpg": encoded(i)})
  write(tmp_path / "in" / "val" / "a", {"bad.jpg": b"bad"})
  run(f"folder:{tmp_path / 'in'}", "--name=own", f"--data_dir={tmp_path}/out")
  words = " ".join(capsys.readouterr().out.split())
  for line in ("2 classes: a, b", "train 12", "validation 4", "left out 1"):
    assert line in words
  assert "val/a/bad.jpg:" in words


class CountsOfThings(embedded.EmbeddedBuilder):
  """Numbers instead of a class: VTAB makes labels from such features."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    number = tfds.features.Scalar(np.int64)
    features = {"image": tfds.features.Image(), "count": number}
    return embedded.EmbeddedInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    yield 0, {"image": encoded(0), "count": 3}


def test_any_data_set_of_tfds_can_be_prepared(tmp_path, capsys):
  run("counts_of_things", f"--data_dir={tmp_path}/on disk")
  out = capsys.readouterr().out
  assert "train                  1 records" in out and "classes" not in out
  assert out.endswith(f" --config.data.data_dir='{tmp_path}/on disk'\n")


@pytest.mark.slow
def test_as_tfrecord(tmp_path, capsys):
  """For a bucket: TFDS's own builders, ours, and imports."""
  for name in "ab":
    write(tmp_path / "images" / name, {"0.jpg": encoded(0)})
  out = tmp_path / "out"
  given = f"--data_dir={out}", "--file_format=tfrecord"
  run("counts_of_things", *given)
  run("digits", *given)
  run(f"folder:{tmp_path}/images", "--name=own", *given)
  for name in ("counts_of_things", "digits", "own"):
    assert list(out.glob(f"{name}/*/*.tfrecord*")), name
    assert not list(out.glob(f"{name}/*/*.array_record*")), name
  source = sources.open_source("digits", "train", str(out))
  assert source.num_examples == 1297
  run("digits", *given)  # is there
  text = error("digits", given[0], "--file_format=array_record")
  assert text.startswith("--file_format: got array_record, expected tfrecord")

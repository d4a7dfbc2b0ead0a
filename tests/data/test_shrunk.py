"""Large images of a folder, shrunk once: what changes, and what does not."""

import os
import pathlib

import disk
import numpy as np
import pytest
import tiny
from kinds import broken, encoded, good, photo, write_classes
from numbered import scored, unusable
from PIL import Image

from vit_jax import experiment
from vit_jax.commands import cache
from vit_jax.data import images, sources
from vit_jax.finetune.data import shrunk

OPS = "decode|resize((12, 20))"
SIDE = 12  # so that photos of 24 x 40 pixels are large


@pytest.fixture(autouse=True)
def of_user(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "vit_jax" / "shrunk"


def folder(root, files):
  """Writes files to one class, and small images to another."""
  return opened(write_classes(root, files, side=(8, 9)))


def opened(dataset):
  return sources.open_source(dataset, "train+val")


def photos(root, count=6):
  files = {
    f"{i}.jpg": encoded(photo().rotate(17 * i), "JPEG", quality=90)
    for i in range(count)
  }
  return folder(root / "images", files)


def files_of(source):
  """What the pipeline decodes, by record."""
  return [source.read(i) for i in range(source.num_examples)]


def reasons(caplog):
  """What is said of each broken file, without its number."""
  return {line.partition(" It does not")[0] for line in unusable(caplog)}


@pytest.mark.slow
def test_only_the_pixels_of_large_images_differ(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr("vit_jax.data.decoding.MAX_UNDECODABLE", 1.0)
  files = good() | {name: data for name, (data, _) in broken().items()}
  source = folder(tmp_path / "images", files)
  small = shrunk.shrunk(opened(source.name), SIDE, OPS)
  want, named = scored(source, OPS), reasons(caplog)
  caplog.clear()
  got = scored(small, OPS)
  for key in ("label", "mask", "index"):
    np.testing.assert_array_equal(got[key], want[key])
  assert len(named) == len(broken()) and reasons(caplog) == named
  for i, path in enumerate(source.paths):
    name = pathlib.Path(path).name
    if not want["mask"][i]:
      continue
    error = np.abs(got["image"][i].astype(int) - want["image"][i]).max()
    with Image.open(path) as image:
      is_large = min(image.size) >= 2 * SIDE
      has_alpha = image.has_transparency_data
    is_made = len(small.read(i)) != os.path.getsize(path)
    assert is_made == (is_large and not has_alpha), name
    # A pixel has 10 levels more than the one beside it, and a JPEG of so few
    # pixels differs as much; with dithered ones, which are averaged, more.
    assert error <= (64 if is_made else 0), (name, error)
    if is_made:
      assert sorted(images.read(small.read(i)).shape) == [3, 12, 20], name
  assert small.identity() == source.identity()
  assert small.record_name(0) == source.record_name(0)
  np.testing.assert_array_equal(small.labels(), source.labels())


def test_pixels_do_not_depend_on_the_cache(tmp_path, of_user, monkeypatch):
  source = photos(tmp_path)
  first = shrunk.shrunk(source, SIDE, OPS)
  want = files_of(first)
  files = sorted(of_user.rglob("*.jpg"))
  assert len(files) == 6 and "6 large images" in first.note()
  times = [f.stat().st_mtime_ns for f in files]
  assert files_of(shrunk.shrunk(source, SIDE, OPS)) == want
  assert [f.stat().st_mtime_ns for f in files] == times  # not made again
  for file in files[:3]:
    file.unlink()  # while a run reads
  assert files_of(first) == want
  cache.main(["--remove=shrunk"])
  assert not of_user.exists()
  monkeypatch.setattr(shrunk, "LIMIT", 0)
  none = shrunk.shrunk(source, SIDE, OPS)
  assert files_of(none) == want
  assert not list(of_user.rglob("*.jpg"))
  assert "6 of them do not fit" in none.note()


def test_damaged_and_older_cache_files_are_made_again(tmp_path, of_user):
  source = photos(tmp_path)
  want = files_of(shrunk.shrunk(source, SIDE, OPS))
  whole = {f: f.read_bytes() for f in of_user.rglob("*.jpg")}
  for file, size in zip(sorted(whole), (0, 9, 99), strict=False):
    file.write_bytes(whole[file][:size])
  assert files_of(shrunk.shrunk(source, SIDE, OPS)) == want
  assert {f: f.read_bytes() for f in whole} == whole
  changed = encoded(photo().rotate(180), "JPEG", quality=50)
  pathlib.Path(source.paths[0]).write_bytes(changed)
  got = files_of(shrunk.shrunk(source, SIDE, OPS))
  assert got[0] not in (want[0], changed) and got[1:] == want[1:]


def test_a_full_disk_keeps_no_half_files(tmp_path, of_user, monkeypatch):
  source = photos(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr(shrunk.os, "replace", disk.full)
    small = shrunk.shrunk(source, SIDE, OPS)
  assert "6 of them do not fit" in small.note()
  assert not [f for f in of_user.rglob("*") if f.is_file()]


def test_small_images_and_other_sources_stay_as_they_are(tmp_path):
  source = photos(tmp_path)
  assert shrunk.shrunk(source, 0, OPS) is source
  assert shrunk.shrunk(source, 13, OPS) is source  # 24 is less than twice
  other = sources.open_source("folder:x", "train", fake=True)
  assert shrunk.shrunk(other, SIDE, OPS) is other


@pytest.mark.slow
def test_a_run_trains_on_shrunk_images_and_scores_whole_ones(tmp_path):
  name, seen = photos(tmp_path, 20).name, []
  options = dict(data__ops=OPS, data__shrink=SIDE, data__batch_size=4)
  run = experiment.Experiment(
    tiny.config(data__dataset=name, **options), on_shrunk=lambda: seen.append(1)
  )
  got = next(run.data.batches(0, process_index=0, process_count=1))
  assert len(seen) == 18  # a watchdog is told of each
  want = scored(run.data.source, OPS)["image"][got["index"]]
  np.testing.assert_array_equal(got["image"], want)
  whole = scored(run.sources.open(name, "train"), OPS)["image"]
  assert (got["image"] != whole[got["index"]]).any()


@pytest.mark.slow
def test_evaluations_decode_a_folder_once_until_it_changes(tmp_path):
  source = photos(tmp_path)
  first = scored(source, OPS)
  assert scored(opened(source.name), OPS)["image"] is first["image"]
  assert scored(source, "decode|resize(5)")["image"].shape[1] == 5
  pathlib.Path(source.paths[0]).write_bytes(encoded(photo(9, 9), "JPEG"))
  assert (scored(source, OPS)["image"] != first["image"]).any()

"""`vit-jax predict`: what it prints, skips and refuses."""

import csv
import io
import json
import pathlib
import sys

import jax
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import vit_jax
from vit_jax.commands import predict as predict_command
from vit_jax.inference import overlay, predict, streaming
from vit_jax.models import precision

HERE = pathlib.Path(__file__).parents[1]
TOKEN = HERE / "data" / "vit_linen_names.weights.npz"  # 32 px, 11 classes


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(TOKEN, verbose=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Nineteen images, one of them cut off and one no image."""
  path = tmp_path_factory.mktemp("images")
  rng = np.random.default_rng(0)
  for i in range(17):
    pixels = rng.integers(0, 256, (20 + i, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path / f"{i:02}.png")
  (path / "05_cut.png").write_bytes((path / "05.png").read_bytes()[:600])
  (path / "07_text.jpg").write_text("no image")
  return path


@pytest.fixture
def call(capsys):
  def of(*argv):
    argv = [str(TOKEN), *map(str, argv), "--batch_size=4"]
    status = predict.run(predict_command.parse(argv))
    return status, *capsys.readouterr()

  return of


def good_ones(folder):
  names = [n.name for n in streaming.find([str(folder)])]
  return [name for name in names if "_" not in name]


def test_streamed_answers_are_those_of_predict(vit, folder, monkeypatch):
  """In batches of one shape, which is compiled; broken images stay in order."""
  shapes, applied = [], vit.probabilities

  def counted(params, images):
    shapes.append(images.shape)
    return applied(params, images)

  images = list(streaming.find([str(folder)]))
  with monkeypatch.context() as patch:
    patch.setitem(vars(vit), "probabilities", counted)  # a cached property
    result = list(vit.predictions(images, 3, batch_size=4))
  assert shapes == [(4, 32, 32, 3)] * 5
  assert [a.name for a in result] == [n.name for n in images]
  bad = [pathlib.Path(a.name).name for a in result if a.error is not None]
  assert bad == ["05_cut.png", "07_text.jpg"]
  good = [a for a in result if a.error is None]
  for answer, expected in zip(
    good, vit.predict([a.name for a in good], top=3), strict=True
  ):
    assert [c.index for c in answer.classes] == [c.index for c in expected]
    # Another batch size is another order of sums, in float32.
    np.testing.assert_allclose(
      [c.probability for c in answer.classes],
      [c.probability for c in expected],
      rtol=1e-5,
    )
    assert answer.pixels.shape == (32, 32, 3)
    assert answer.pixels.dtype == np.uint8


# The command.


def test_table_json_and_csv_say_the_same(call, folder, vit):
  status, out, err = call(folder, "--top=3")
  lines = out.splitlines()
  assert status == 0 and len(lines) == 1 + 3 * 17
  assert lines[1].startswith(f"{folder}/00.png  ")
  assert f"{folder}/05_cut.png: " in err
  assert "17 images classified, 2 could not be read" in err
  _, out, _ = call(folder, "--json", "--top=3")
  result = [json.loads(line) for line in out.splitlines()]
  _, out, _ = call(f"{folder}/??.png", "--csv", "--top=3")
  rows = list(csv.DictReader(io.StringIO(out)))
  assert [
    (f["image"], p["class"], f"{p['probability']:.6f}")
    for f in result
    for p in f["predictions"]
  ] == [(r["image"], r["class"], r["probability"]) for r in rows]
  (expected,) = vit.predict(folder / "16.png", top=3)
  assert [p["index"] for p in result[-1]["predictions"]] == [
    c.index for c in expected
  ]


def test_none_can_be_read(call, folder, tmp_path):
  status, out, err = call(folder / "07_text.jpg", folder / "lost.png")
  assert status == 1 and not out
  assert f"{folder}/lost.png: " in err
  path = tmp_path / "x.npz"
  assert call(folder / "07_text.jpg", f"--features={path}")[0] == 1
  assert not path.exists()


@pytest.mark.slow
def test_standard_input_is_an_image_or_a_list(call, folder, monkeypatch):
  image, answers = folder / "03.png", []
  for data in (f"{image}\n".encode(), image.read_bytes()):
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdin", stdin)
    answers.append(json.loads(call("-", "--json")[1]))
  assert [a.pop("image") for a in answers] == [str(image), "-"]
  assert answers[0] == answers[1]


@pytest.mark.slow
def test_larger_images_are_allowed(call, folder, monkeypatch):
  image = folder / "00.png"  # 30 x 20
  status, _, err = call(image, "--max_pixels=599")
  assert status == 1 and "30 x 20" in err and "--max_pixels" in err
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow's own
  assert call(image)[0] == 1
  assert call(image, "--max_pixels=89478486")[0] == 0


@pytest.mark.slow
def test_products_have_the_type_that_the_chip_multiplies(
  call, folder, monkeypatch
):
  monkeypatch.setattr(precision, "cpu_flags", lambda: {"fma", "amx_bf16"})
  results = []
  for version, dtype in (("0.10.2", "float32"), ("0.12.1", "bfloat16")):
    monkeypatch.setattr(jax, "__version__", version)
    _, out, err = call(folder / "00.png", "--json")
    assert f"decode|resize(32), {dtype}\n" in err
    results.append(json.loads(out)["predictions"])
  # docs/tasks/predict.md states the bound. A product is rounded to 8 bits.
  for a, b in zip(*results, strict=True):
    assert abs(a["probability"] - b["probability"]) <= 0.01


def test_products_of_a_resnet_stay_in_float32(monkeypatch):
  monkeypatch.setattr(precision, "fastest_dtype", lambda: "bfloat16")
  bit = vit_jax.load(HERE / "data" / "bit_v2.weights.npz", verbose=False)
  assert precision.with_fastest_dtype(bit.config).dtype == "float32"


@pytest.mark.slow
def test_attention_beside_the_image(call, folder, tmp_path, vit):
  argv = f"{folder}/0[0-4].png", "--json", "--attention", "--dtype=float32"
  argv = *argv, f"--out_dir={tmp_path}/maps"
  status, out, _ = call(*argv)
  result = [json.loads(line) for line in out.splitlines()]
  assert status == 0 and len(result) == 5
  for row in result:
    stem = pathlib.Path(row["image"]).stem
    assert row["attention"] == f"{tmp_path}/maps/{stem}.png"
  with Image.open(result[-1]["attention"]) as picture:
    drawn = np.asarray(picture)
  # The last is of a batch that was filled up; the map is its own.
  (answer,) = vit.predictions(
    [streaming.Named("x", folder / "04.png")], attention=True
  )
  alone = np.asarray(overlay.beside(answer.pixels, answer.attention))
  # Sums of another batch size differ in float32, and round to another level.
  np.testing.assert_allclose(drawn.astype(int), alone.astype(int), atol=1)
  assert answer.attention.shape == (4, 4)
  assert answer.attention.sum() == pytest.approx(1, rel=1e-5)
  # Pictures have the names of images, so their folder is another.
  before = (folder / "00.png").read_bytes()
  with pytest.raises(ValueError, match="--out_dir: got .*expected another"):
    call(folder / "00.png", "--attention", f"--out_dir={folder}/.")
  assert (folder / "00.png").read_bytes() == before


@pytest.mark.parametrize(
  "suffix, layer",
  [
    pytest.param("npz", "pre_logits", marks=pytest.mark.slow),
    pytest.param("parquet", "encoded", marks=pytest.mark.nightly),
  ],
)
def test_features_by_the_names_of_files(
  call, folder, vit, tmp_path, suffix, layer
):
  path = tmp_path / f"features.{suffix}"
  argv = folder, f"--features={path}", f"--layer={layer}"
  status, out, err = call(*argv, "--dtype=float32")
  names = good_ones(folder)
  assert (status, out) == (0, "")
  assert f"cannot read {folder}/07_text.jpg" in err
  expected = vit.features(names, layer)
  if suffix == "npz":
    file = np.load(path)
    result, images = file["features"], file["image"].tolist()
  else:
    table = parquet.read_table(path)
    images = table["image"].to_pylist()
    result = np.array(table["features"].to_pylist(), np.float32)
    shape = table.schema.field("features").type
    assert shape == pyarrow.list_(
      pyarrow.list_(pyarrow.float32(), expected.shape[2]), expected.shape[1]
    )
  assert images == names and result.dtype == np.float32
  # Another batch size is another order of sums.
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
  assert f"{path}: {layer} of 17 images, float32 {[*expected.shape]}" in err

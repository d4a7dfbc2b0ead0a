"""What models show of themselves: the charts, and what is left out."""

import pathlib
import xml.etree.ElementTree

import matplotlib as mpl
import numpy as np
import pytest

import vit_jax
from vit_jax.checkpointing import checkpointer
from vit_jax.models.filters import Components
from vit_jax.tools.reporting import model_figures, runs
from vit_jax.tools.reporting.charts import ChartFiles

DATA = pathlib.Path(__file__).parents[1] / "data"
RNG = np.random.default_rng(0)


def drawn(figure):
  """Returns its texts, and the arrays of its images."""
  texts = [t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text()]
  arrays = [np.asarray(i.get_array()) for a in figure.axes for i in a.images]
  return texts, arrays


def test_zero_is_grey_and_the_largest_value_black_or_white():
  images = np.zeros((9, 2, 2, 3), np.float32)
  images[0, 0, 0] = [0.5, -0.25, 0]
  images[8, 1, 1] = [0, 0, -2]
  figure = model_figures.draw_filters(
    Components(images, np.full(9, 0.1, "f")), "a $"
  )
  texts, (picture,) = drawn(figure)
  assert {"a $", "9 components, 90% of the variance"} <= set(texts)
  assert picture.shape == (2 * 3 - 1, 7 * 3 - 1, 4)
  np.testing.assert_allclose(picture[0, 0], [1, 0.25, 0.5, 1])
  np.testing.assert_allclose(picture[0, 1], [0.5, 0.5, 0.5, 1])
  np.testing.assert_allclose(picture[4, 4], [0.5, 0.5, 0, 1])
  assert picture[0, 2, 3] == 0  # a gap
  assert not picture[3:, 6:, 3].any()  # places without a component


def test_a_point_for_each_head():
  distances = np.array([[10, 20], [30, 50]], "f")
  axes = model_figures.draw_mean_distance(distances, 25.0, "a").axes[0]
  even, mean, heads = (np.array(line.get_ydata()) for line in axes.lines)
  assert set(even) == {25} and mean.tolist() == [15, 40]
  assert heads.tolist() == [10, 20, 30, 50]
  assert axes.lines[2].get_xdata().tolist() == [1, 1, 2, 2]
  assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 50


def test_heads_lie_by_layer_and_each_has_its_own_scale():
  weights = RNG.uniform(0.1, 1, (3, 2, 4, 5)).astype("f")
  weights[0, 1] /= 100
  image = RNG.integers(0, 256, (8, 10, 3), np.uint8)
  figure = model_figures.draw_heads(weights, (3, 1), image, "a")
  _, (above, picture) = drawn(figure)
  np.testing.assert_array_equal(above, image)
  assert picture.shape == (3 * 5 - 1, 2 * 6 - 1)
  first = weights[0, 1] / weights[0, 1].max()
  np.testing.assert_allclose(picture[:4, 6:11], first, rtol=1e-6)
  frames = figure.axes[1].patches
  assert len(frames) == 6 and frames[0].get_xy() == (0.5, 2.5)
  assert frames[-1].get_xy() == (6 + 0.5, 2 * 5 + 2.5)


@pytest.fixture(scope="module")
def of():
  """Returns what a file shows of a few random images."""

  def of(name, num_images=2):
    vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False)
    images = RNG.integers(0, 256, (num_images, *vit.image_size, 3), np.uint8)
    captions = [f"image {i}" for i in range(num_images)]
    return model_figures.inspect_model(name, name, vit, list(images), captions)

  return of


def parts_of(*insides, **options):
  chart_files = ChartFiles()
  options = {"patch": None, "num_shown": 9} | options
  return model_figures.all_sections(
    insides, chart_files, **options
  ), chart_files.files


@pytest.mark.slow
def test_everything_of_a_transformer(of):
  parts, charts = parts_of(of("vit_linen_names", 3), num_shown=2)
  assert list(charts) == [
    f"{kind}_vit_linen_names.svg"
    for kind in ("filters", "positions", "distance", "heads")
  ]
  assert [part.title for part in parts] == [
    "Filters",
    "Position embeddings",
    "Mean attention distance",
    "Attention of one patch",
    "Where the model looks",
  ]
  left_out = [text for part in parts for text in part.left_out]
  assert left_out == ["1 more image, whose map is in rollout/"]
  assert "mean over patches and 3 images" in parts[2].text
  assert "read by the class token" in parts[4].text
  assert parts[4].text.endswith(" Below are the answer and its probability.")
  assert parts[4].body.count("<img") == 2
  for svg in charts.values():
    xml.etree.ElementTree.fromstring(svg)


def test_of_a_run_only_the_first_layer_stays_in_memory(tmp_path):
  """A report has several runs, of any size."""
  vit = vit_jax.load(DATA / "vit_token.weights.npz", verbose=False)
  metadata = vit.metadata() | {"class_names": None}
  checkpointer.write_params(
    str(tmp_path / "checkpoints" / "2"), vit.params, metadata
  )
  (tmp_path / "metrics.jsonl").touch()
  (run,) = runs.find_runs(tmp_path)
  assert [*model_figures.inspect_run(run).vit.params] == ["embedding"]
  chart_files = ChartFiles()
  page = model_figures.runs_section([run], chart_files)
  assert [*chart_files.files] == [
    f"filters_{run.name}.svg",
    f"positions_{run.name}.svg",
  ]
  assert "no images" in page


def test_what_is_left_out(of):
  parts, charts = parts_of(of("bit_v2"), of("vit_token", 0))
  assert list(charts) == [
    *("filters_bit_v2.svg", "filters_vit_token.svg"),
    "positions_vit_token.svg",
  ]
  assert {part.title: part.left_out for part in parts} == {
    "Filters": [],
    "Position embeddings": ["bit_v2, R50x0.5 has no positions"],
    **dict.fromkeys(
      (
        "Mean attention distance",
        "Attention of one patch",
        "Where the model looks",
      ),
      [
        "bit_v2, R50x0.5 has no attention",
        "vit_token, no images were given",
      ],
    ),
  }


def test_batches_do_not_show(of, monkeypatch):
  monkeypatch.setattr(model_figures.inspection, "batch_size", lambda *_: 2)
  two = of("bv_map", 5)
  monkeypatch.setattr(model_figures.inspection, "batch_size", lambda *_: 16)
  whole = model_figures.inspect_model(
    "", "", two.vit, list(two.images), two.captions
  )
  assert two.maps.shape == (5, *two.grid)
  np.testing.assert_allclose(two.maps, whole.maps, rtol=1e-5)
  np.testing.assert_allclose(two.distances, whole.distances, rtol=1e-5)


def test_weights_that_are_no_numbers_are_refused(of):
  one = of("vit_gap", 1)
  params = dict(one.vit.params)
  params["embedding"] = {
    k: np.full_like(v, np.nan) for k, v in params["embedding"].items()
  }
  vit = vit_jax.inference.pretrained.dataclasses.replace(one.vit, params=params)
  with pytest.raises(ValueError, match=r"a: got attention that is not a numb"):
    model_figures.inspect_model("a", "a", vit, list(one.images), one.captions)

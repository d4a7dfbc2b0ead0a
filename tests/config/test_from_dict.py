"""Dataclasses from dicts: what is read of JSON that others wrote."""

import dataclasses
import json
import re
from typing import Any

import pytest

from vit_jax.config import json_file
from vit_jax.config.from_dict import at_least, from_dict
from vit_jax.options import nearest


@dataclasses.dataclass(frozen=True)
class Inner:
  side: int = at_least(1, 7)


@dataclasses.dataclass(frozen=True)
class Outer:
  name: str = "x"
  size: tuple[int, int] | None = at_least(1)
  sides: tuple[int, ...] = ()
  scale: float = 1.0
  texts: dict[str, str] = dataclasses.field(default_factory=dict)
  inner: Inner = Inner()
  rows: tuple[Inner, ...] = ()
  anything: Any = None


def test_what_is_read_of_a_file(tmp_path):
  path = tmp_path / "a.json"
  values = {"size": [2, 3], "sides": 4, "scale": 2, "inner": {"side": 5}}
  values |= {"rows": [{"side": 6}, {}], "texts": {"a": "b"}, "more": {"x": 1}}
  path.write_text(json.dumps(values | {"name": None}))
  assert json_file.read_as(Outer, path) == Outer(
    size=(2, 3),
    sides=(4,),
    scale=2.0,
    texts={"a": "b"},
    inner=Inner(5),
    rows=(Inner(6), Inner(7)),
  )
  assert json_file.read_as(Outer, tmp_path / "none.json") == Outer()


@pytest.mark.parametrize(
  "values, words",
  [
    ({"name": 3}, "name: got 3"),
    ({"size": [1]}, "size: got [1], expected a value of type 2 whole"),
    ({"size": [0, 1]}, "size: got [0, 1], expected 1 or more"),
    ({"scale": "2"}, "scale: got '2'"),
    ({"scale": float("nan")}, "scale: got nan"),
    ({"texts": {"a": None}}, "texts.a: got None"),
    ({"texts": [1]}, "texts: got [1]"),
    ({"inner": {"side": 0}}, "inner.side: got 0"),
    ({"rows": [{"side": 1.5}]}, "rows[0].side: got 1.5"),
    ([1], "a.json: got [1]"),
  ],
)
def test_values_of_other_types(values, words):
  with pytest.raises(ValueError, match=re.escape(words)) as e:
    json_file.build(Outer, values, "a.json")
  assert str(e.value).startswith("a.json: ")


def test_all_errors_at_once_and_defaults_in_their_place():
  errors = []
  values = {"name": 1, "scale": 3, "inner": 2}
  assert from_dict(Outer, values, "top", errors) == Outer(scale=3.0)
  assert [error.partition(": ")[0] for error in errors] == [
    "top.name",
    "top.inner",
  ]


KNOWN = (
  *("batch_size", "class_token", "fp16", "head_bias", "image_size", "mlp_dim"),
  *("layer_scale", "num_heads", "num_processes", "patch_bias", "pre_norm"),
  *("projection", "rope", "steps", "workdir", "ws_eps"),
)


@pytest.mark.parametrize(
  "word, meant",
  [
    *(("batchsize", "batch_size"), ("img_size", "image_size")),
    *(("mlpdim", "mlp_dim"), ("preporjection", "projection")),
    *(("rpoe", "rope"), ("stteps", "steps"), ("workdri", "workdir")),
    *(("WORKDIR", "workdir"), ("heads", "num_heads")),
  ],
)
def test_a_typing_mistake_is_recognised(word, meant):
  assert nearest(word, KNOWN) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize(
  "word",
  "bf16 classes crop drop eps head_dim hidden_size image_mean image_std layers"
  " no_head num_channels num_classes patch_size precision qk_norm".split(),
)
def test_a_name_of_another_meaning_is_not_suggested(word):
  assert not nearest(word, KNOWN)

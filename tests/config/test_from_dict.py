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
  values = {"size": [1, 3], "sides": 4, "scale": 2, "inner": {"side": 5}}
  values |= {"rows": [{"side": 6}, {}], "texts": {"a": "b"}, "more": {"x": 1}}
  path.write_text(json.dumps(values | {"name": None}))
  assert json_file.read_as(Outer, path) == Outer(
    size=(1, 3),
    sides=(4,),
    scale=2.0,
    texts={"a": "b"},
    inner=Inner(5),
    rows=(Inner(6), Inner(7)),
  )
  assert json_file.read_as(Outer, tmp_path / "none.json") == Outer()


def test_values_of_other_types_all_at_once():
  for values, words in (
    ({"name": 3}, "name: got 3"),
    ({"size": [1]}, "size: got [1], expected a value of type 2 whole"),
    ({"size": [0, 1]}, "size: got [0, 1], expected 1 or more"),
    ({"scale": float("nan")}, "scale: got nan"),
    ({"texts": {"a": None}}, "texts.a: got None"),
    ({"inner": {"side": 0}}, "inner.side: got 0"),
    ({"rows": [{"side": 1.5}]}, "rows[0].side: got 1.5"),
    ([1], "a.json: got [1]"),
  ):
    with pytest.raises(ValueError, match=re.escape(words)) as e:
      json_file.build(Outer, values, "a.json")
    assert str(e.value).startswith("a.json: ")
  errors, values = [], {"name": 1, "scale": 3, "inner": 2}
  # Defaults are in the place of what is wrong.
  assert from_dict(Outer, values, "top", errors) == Outer(scale=3.0)
  assert [e.partition(": ")[0] for e in errors] == ["top.name", "top.inner"]


def test_a_typing_mistake_is_recognised():
  """And no name of another meaning is suggested."""
  known = "batch_size image_size layer_scale mlp_dim num_heads projection steps"
  known = known.split()
  for word, meant in (
    ("batchsize", "batch_size"),
    ("img_size", "image_size"),
    ("preporjection", "projection"),
    ("stteps", "steps"),
    ("STEPS", "steps"),
    ("heads", "num_heads"),
  ):
    assert nearest(word, known) == f" Did you mean {meant!r}?"
  for word in "classes eps head_dim image_mean layers patch_size".split():
    assert not nearest(word, known)

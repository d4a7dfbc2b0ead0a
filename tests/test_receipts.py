"""Every number in a table of README and docs says where it is from."""

import doctest
import json
import pathlib

import pytest
import receipts

ROOT = pathlib.Path(__file__).parents[1]


def test_every_measured_number_has_a_receipt():
  assert receipts.faults() == []


def test_examples():
  assert doctest.testmod(receipts).failed == 0


TABLE = """
| what | expected | images/s | note |
|---|---|---|---|
| ours | 9 | 1,002 (0.5) | kept: 3 |
| others | 9 | ~7 | |
| text | 8 | none | |
"""
LINE = {
  "name": "speed",
  "command": "x",
  "config": "configs/a.py",
  "commit": "c",
  "versions": {},
  "machine": "m",
  "values": {"ours": [1002, 0.5], "others": [7], "left out": [1]},
}
KNOWN = {"speed": LINE}


def _faults(text, known=KNOWN):
  return receipts.table_faults(text, known)


def test_a_table_with_its_receipt():
  assert _faults(f"<!-- receipt: speed -->\n{TABLE}") == []
  assert _faults(f"<!-- receipt: speed -->{TABLE}") == []


@pytest.mark.parametrize("kind", ["source", "estimate", "arithmetic", "tests"])
def test_a_table_whose_numbers_are_from_elsewhere(kind):
  assert _faults(f"<!-- {kind}: arXiv:2010.11929, Table 6 -->\n{TABLE}") == []


def test_a_table_without_numbers_needs_nothing():
  text = "| option | of 3 |\n|---|---|\n| `a=1` | for 224 px |\n"
  assert _faults(text) == []
  assert len(_faults(text.replace("for 224", "224"))) == 1


@pytest.mark.parametrize(
  "change, message",
  [
    (("<!-- receipt: speed -->\n", ""), "line 2: a table with numbers, and no"),
    (("receipt: speed", "receipt: sped"), "docs/receipts.jsonl has no 'sped'"),
    (("receipt: speed", "invoice: speed"), "a table with numbers, and no"),
    (("speed -->\n", "speed -->\nA text between.\n"), "a table with numbers"),
    (("1,002", "1,003"), "'ours' has [1003.0, 0.5], its receipt [1002, 0.5]"),
    (("1,002 (0.5)", "0.5 (1,002)"), "'ours' has [0.5, 1002.0]"),
    (("~7 |", "~7 | 8"), "'others' has [7.0, 8.0]"),
    (("| others", "| mine"), "no receipt has a row 'mine'"),
    (("none", "12"), "no receipt has a row 'text'"),
    (("receipt: speed", "receipt: lost.jsonl"), "docs/ has no lost.jsonl"),
  ],
)
def test_numbers_without_a_receipt(change, message):
  text = f"<!-- receipt: speed -->\n{TABLE}"
  assert text.count(change[0]) == 1
  found = _faults(text.replace(*change))
  assert found and message in found[0]


def test_a_text_says_what_its_receipt_says():
  text = (
    "# A\n<!-- receipt: speed -->\n\n1,002 of 0.5 took 7 s, {} m.\n# B\n1\n"
  )
  assert _faults(text.format(1)) == []
  assert _faults(text.format(2)) == ["line 4: the text lacks left out 1."]


def test_results_in_configs():
  text = "Cost: 3 %. Result (jax 0.10.2): 94.7 % of all,\nbut 4 % of {}.\n\n5 %"
  line = {**LINE, "values": {"all": [94.7], "few": [4]}}
  assert receipts.config_faults("configs/a.py", text, {"x": line}) == []
  assert receipts.config_faults("configs/b.py", text, {"x": line}) == [
    "configs/b.py: no receipt has 94.7 %, 4 %."
  ]


def test_a_file_of_receipts(tmp_path, monkeypatch):
  monkeypatch.setattr(receipts, "FILE", tmp_path / "receipts.jsonl")
  text = f"<!-- receipt: runs.jsonl -->\n{TABLE}"
  (tmp_path / "runs.jsonl").write_text(json.dumps({"machine": "m"}) + "\n")
  (fault,) = _faults(text)
  assert "runs.jsonl: lines without " in fault and "commit" in fault
  (tmp_path / "runs.jsonl").write_text(json.dumps(LINE | {"versions": 1}))
  assert _faults(text) == []


def test_a_receipt_lacks_nothing_and_is_one(tmp_path):
  path = tmp_path / "receipts.jsonl"
  for lines, message in (
    ([{k: v for k, v in LINE.items() if k != "commit"}], ":1: has no commit"),
    ([LINE, LINE], ":2: a second 'speed'"),
  ):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message):
      receipts.read(path)


def _run(folder, **changes):
  metadata = {"versions": {"jax": "1"}, "commit": "abc", "devices": "1 x cpu"}
  rows = [
    {"step": 1, "time": 1.0, "train/loss": 2.0, "val/top1": 0.25},
    {"step": 2, "time": 2.0, "train/exaflops": 1e-9, "val/top1": 0.5},
  ]
  folder.mkdir()
  (folder / "metadata.json").write_text(json.dumps(metadata | changes))
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "metrics.jsonl").write_text(text)
  return str(folder)


def test_a_run_gives_a_receipt_once(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(receipts, "FILE", tmp_path / "receipts.jsonl")
  receipts.FILE.write_text("")
  monkeypatch.setattr(receipts.read, "__defaults__", (receipts.FILE,))
  command = "vit-jax train --config=configs/a.py:x"
  words = ["mine", _run(tmp_path / "run"), f"--command={command}"]
  receipts.main([*words, "--machine=EPYC"])
  assert receipts.read() == {
    "mine": {
      "name": "mine",
      "command": command,
      "config": "configs/a.py:x",
      "commit": "abc",
      "versions": {"jax": "1"},
      "machine": "EPYC; 1 x cpu",
      "values": {"val/top1": [0.5], "train/exaflops": [1e-9]},
    }
  }
  assert "added 'mine'" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="a receipt 'mine' already"):
    receipts.main(words)
  with pytest.raises(SystemExit, match="recorded no commit"):
    receipts.main(["b", _run(tmp_path / "b", commit=None), "--command=x"])
  with pytest.raises(SystemExit, match="no metadata.json of a run"):
    receipts.main(["c", str(tmp_path), "--command=x"])

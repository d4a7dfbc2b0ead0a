"""Checks what `make demo` made: python tests/check_demo.py runs/demo."""

import json
import pathlib
import sys

SHOTS = {"1", "5", "10", "25"}


def check(folder: pathlib.Path) -> None:
  """Raises AssertionError unless the demo shows what it promises."""
  summary = json.loads((folder / "summary.json").read_text())
  print(json.dumps(summary, indent=1))
  fewshot, pixels, random = (
    summary[k] for k in ("fewshot", "fewshot_raw_pixels", "fewshot_random_init")
  )
  assert fewshot.keys() == pixels.keys() == random.keys() == SHOTS
  assert fewshot["10"] >= 0.88
  assert fewshot["10"] > pixels["10"] and fewshot["10"] > random["10"]
  assert summary["glyphs_val_accuracy"] > 0.9
  tuned = summary["digits_test_accuracy"]
  assert tuned >= 0.98
  assert tuned - summary["digits_test_accuracy_from_scratch"] >= 0.05
  assert summary["wall_seconds"] > 0 and summary["versions"]["jax"]
  page = (folder / "report.html").read_text()
  assert 'src="http' not in page and page.count("<svg ") > 10
  assert "Worst mistakes" in page
  assert page.count("Where the model looks: ") == 3  # a part for each run
  for path in (folder / "figures").glob("*.svg"):
    assert path.read_text().rstrip().endswith("</svg>")


if __name__ == "__main__":
  check(pathlib.Path(sys.argv[1]))

"""The frame of a self-contained HTML page: one column, light or dark."""

import base64
import html

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d1d1f; --soft: #63636a; --line: #e2e2e6;
  --wash: #f5f5f7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #17181a; --ink: #e8e8ea; --soft: #a2a2aa; --line: #35363a;
    --wash: #222327;
  }
}
* { box-sizing: border-box; }
body {
  max-width: 960px; margin: 0 auto; padding: 32px 16px 64px;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; }
h2 {
  font-size: 20px; margin: 48px 0 12px; padding-top: 16px;
  border-top: 1px solid var(--line);
}
p { margin: 0 0 12px; max-width: 70ch; }
.soft, figcaption, .missing { color: var(--soft); font-size: 14px; }
.missing { border-left: 3px solid var(--line); padding-left: 10px; }
.tiles {
  display: grid; gap: 12px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
}
.tiles div { background: var(--wash); border-radius: 8px; padding: 12px 14px; }
.tiles b {
  display: block; font-size: 24px; line-height: 1.25;
  font-variant-numeric: tabular-nums;
}
.tiles span {
  display: block; color: var(--soft); font-size: 13px; line-height: 1.35;
}
.grid {
  display: grid; gap: 16px; margin: 12px 0; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
}
.stack { display: grid; gap: 28px; margin: 16px 0; }
.stack figure { max-width: 640px; }
.grid figure { max-width: 560px; }
figure { margin: 0; }
figcaption { margin-bottom: 6px; }
/* The pictures are black on white; in the dark they lie on white cards. */
figure img {
  display: block; width: 100%; height: auto; background: #fff;
}
@media (prefers-color-scheme: dark) {
  figure img { padding: 8px; border-radius: 8px; filter: brightness(0.92); }
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.35; }
th, td {
  padding: 6px 14px 6px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line);
}
th { font-weight: 600; }
.facts { width: 100%; }
.facts tr:first-child th { color: var(--ink); }
.facts th:first-child, .numbers th:first-child {
  color: var(--soft); font-weight: 400; white-space: nowrap;
}
.facts td, .numbers td { font-variant-numeric: tabular-nums; }
.facts td { min-width: 110px; }
.numbers { width: 100%; }
.numbers td, .numbers th:not(:first-child) {
  text-align: right; white-space: nowrap; padding: 8px 0 8px 14px;
}
@media (max-width: 560px) {
  .facts { font-size: 12px; overflow-wrap: anywhere; }
  .facts th:first-child { overflow-wrap: normal; }
  .facts td { min-width: 72px; padding-right: 8px; }
  .numbers { font-size: 13px; }
  .numbers td, .numbers th:not(:first-child) { padding-left: 8px; }
}
details { margin-top: 10px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
pre {
  overflow-x: auto; background: var(--wash); border-radius: 8px;
  padding: 12px; font-size: 12px; line-height: 1.4;
}
"""


def page(title: str, body: str) -> str:
  """Returns the whole document; `body` is HTML, `title` is text."""
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def picture(png: bytes, alt: str, caption: str = "") -> str:
  """Returns a figure that holds its picture itself; both texts are text."""
  source = base64.b64encode(png).decode()
  below = caption and f"<figcaption>{html.escape(caption)}</figcaption>"
  return (
    f'<figure>{below}<img alt="{html.escape(alt)}"'
    f' src="data:image/png;base64,{source}"></figure>'
  )


def table(kind: str, head: list[str], rows: list[list[str]]) -> str:
  """Returns a table of texts; the first cell of a row names it.

  Args:
    kind: "facts" (texts) or "numbers" (right-aligned).
    head: First row.
    rows: All others; a cell that starts with "*" is the best of its column.
  """
  cell = lambda text: (
    f"<td><b>{html.escape(text[1:])}</b></td>"
    if text.startswith("*")
    else f"<td>{html.escape(text)}</td>"
  )
  first = "".join(f"<th>{html.escape(text)}</th>" for text in head)
  rest = "".join(
    f"<tr><th>{html.escape(name)}</th>{''.join(map(cell, cells))}</tr>"
    for name, *cells in rows
  )
  return (
    f'<div class="wide"><table class="{kind}"><tr>{first}</tr>{rest}</table>'
    "</div>"
  )


def share(value: float | None) -> str:
  """Writes a share in percent, as tables have it."""
  return "—" if value is None else f"{100 * value:.1f}%"


def missing(what: str) -> str:
  """Says what the report lacks, or nothing if it lacks nothing."""
  return what and f'<p class="missing">Left out: {html.escape(what)}.</p>'

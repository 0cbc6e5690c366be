"""How a report's page looks: on a screen and on paper, wide and narrow, light and dark.

The drawings take their colours from here too: `INK` and `FAINT` for what every drawing has, and
`SERIES`, which those with any of the usual colour-vision deficiencies can tell apart.
"""

# Okabe and Ito's palette (2008), darkened where a thin line on white would be too pale, and
# lightened for dark pages. An agent has the same place in both.
_SERIES_ON_LIGHT = ("#0072b2", "#d55e00", "#008560", "#a8518a", "#8a6d00", "#4b5563", "#5b3fa8")
_SERIES_ON_DARK = ("#6cb8f0", "#ff9a57", "#3ecf9f", "#e69ac8", "#e3c04b", "#b6bfcc", "#b39df5")

INK, FAINT = "var(--ink)", "var(--faint)"
SERIES = tuple(f"var(--series-{index})" for index in range(len(_SERIES_ON_LIGHT)))


def _series(colours: tuple[str, ...]) -> str:
    return " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(colours))


_LIGHT = (
    "--paper: #ffffff; --ink: #1b1f24; --quiet: #57606a; --faint: #d0d5db; --wash: #f5f6f8; "
    f"--link: #0b5cad; --warning: #b54708; --warning-wash: #fff6ec; {_series(_SERIES_ON_LIGHT)}"
)
_DARK = (
    "--paper: #14171b; --ink: #e4e7eb; --quiet: #a0a8b3; --faint: #3a414a; --wash: #1c2026; "
    f"--link: #7db7f5; --warning: #f0a45d; --warning-wash: #2b2119; {_series(_SERIES_ON_DARK)}"
)

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 76rem; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; }}
h2 {{ font-size: 1.45rem; margin: 3.5rem 0 .75rem; padding-top: 1rem;
  border-top: 2px solid var(--ink); }}
h3 {{ font-size: 1.1rem; margin: 2.25rem 0 .5rem; }}
p, ul {{ max-width: 46rem; margin: .6rem 0; }}
a {{ color: var(--link); }}
nav {{ display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0 0 1.5rem; }}
code, pre {{ font: .86em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
pre {{ overflow-x: auto; padding: .75rem 1rem; background: var(--wash); border-radius: 4px; }}
.notice {{ margin: 1rem 0; padding: .4rem 1rem; background: var(--warning-wash);
  border-left: 4px solid var(--warning); }}
.notice ul {{ padding-left: 1.2rem; }}
.table {{ overflow-x: auto; margin: 1.25rem 0; }}
table {{ border-collapse: collapse; font-size: .88rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; border-bottom: 1.5px solid var(--ink); }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .4rem; }}
thead th {{ border-top: 1.5px solid var(--ink); border-bottom: 1px solid var(--ink);
  vertical-align: bottom; font-weight: 600; }}
th, td {{ padding: .3rem .9rem .3rem 0; vertical-align: top; }}
th:last-child, td:last-child {{ padding-right: .25rem; }}
tbody tr + tr > * {{ border-top: 1px solid var(--faint); }}
tbody th {{ font-weight: 500; white-space: nowrap; }}
.number + .text, .number + .code {{ padding-left: .6rem; }}
.text, .code {{ text-align: left; }}
td.text {{ min-width: 6rem; max-width: 24rem; }}
td.text:last-child {{ min-width: 14rem; overflow-wrap: anywhere; }}
.code {{ white-space: nowrap; }}
.number {{ text-align: right; white-space: nowrap; }}
thead .number {{ white-space: normal; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr));
  gap: 1.25rem; margin: 1.25rem 0; }}
figure {{ margin: 0; break-inside: avoid; }}
figure svg {{ display: block; width: 100%; max-width: 36rem; height: auto; }}
svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
figcaption {{ font-size: .86rem; color: var(--quiet); }}
details {{ margin: 1rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
@media (max-width: 40rem) {{
  main {{ padding: 1.25rem 1rem 3rem; }}
  h1 {{ font-size: 1.5rem; }}
  table {{ width: max-content; }}
  tbody th, thead th:first-child {{ position: sticky; left: 0; background: var(--paper); }}
}}
@media print {{
  :root {{ color-scheme: light; }}
  body {{ font-size: 10pt; }}
  main {{ max-width: none; padding: 0; }}
  nav {{ display: none; }}
  .table {{ overflow: visible; }}
  table {{ font-size: 7.5pt; }}
  .code {{ white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }}
  tr, figure, .notice {{ break-inside: avoid; }}
}}
"""

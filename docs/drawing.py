"""Pictures as SVG, light or dark as the reader's system is: what `docs/pictures.py` draws with."""

from collections.abc import Iterable
from html import escape

WIDTH = 760
TONES = {"a": "#3b82d6", "b": "#d9822b", "c": "#2f9e68", "d": "#a855b5", "e": "#8a8f98"}
STYLE = (
    "text{font:14px system-ui,'DejaVu Sans',sans-serif;fill:#24292f}"
    ".mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px}"
    ".small{font-size:12px}.strong{font-weight:bold}.quiet{fill:#57606a}"
    ".paper{fill:#fff}.line{stroke:#6e7781;fill:none}"
    + "".join(f".{k}{{fill:{c};fill-opacity:.35;stroke:{c}}}" for k, c in TONES.items())
    + "".join(f".line.{k}{{fill:none;stroke-width:2}}.text.{k}{{fill-opacity:1}}" for k in TONES)
    + ".none{fill:none;stroke:#8a8f98}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#a8b1bb}.paper{fill:#1c2128}}"
)


class Picture:
    """Shapes and texts, from the top left, in pixels; light or dark as the reader's system is."""

    def __init__(self, height: int, title: str, width: int = WIDTH):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, tone: str, text: str = ""
    ) -> None:
        """A rectangle, with a text in the midst of it."""
        size = f'x="{x:g}" y="{y:g}" width="{max(width, 0.5):g}" height="{height:g}"'
        self.parts.append(f'<rect {size} rx="2" class="{tone}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, "small", "middle")

    def text(
        self, x: float, y: float, text: object, style: str = "", anchor: str = "start"
    ) -> None:
        """A line of text."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} class="{style}">{escape(str(text))}</text>')

    def line(
        self, points: Iterable[tuple[float, float]], style: str = "", arrow: bool = False
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end = ' marker-end="url(#end)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" class="line {style}"{end}/>')

    def svg(self) -> str:
        """The file's content."""
        head = (
            f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}"'
        )
        arrow = (
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 8,4 0,8z" fill="#777"/></marker></defs>'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" class="paper"/>'
        body = "\n".join([f"<style>{STYLE}</style>", arrow, paper, *self.parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {head}>\n{body}\n</svg>\n'

"""The last minute of a command, as an SVG that plays it: `python docs/recording.py FILE COMMAND …`.

`docs/assets/recording.svg` is of `python -m recipes.lm`, as a terminal of 100 columns showed it.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from drawing import Picture

COLUMNS, ROWS = 100, 36
SECONDS = 60  # of the command's end
FASTER, HOLD = 3, 5  # as it is played, and the seconds that the last screen stays
WIDE, HIGH = 8.4, 19  # a character, in pixels
TONES = {"green": "c", "red": "b", "blue": "a", "cyan": "a", "magenta": "d"}
STYLE = """<style>.f{visibility:hidden;animation:%gs step-end infinite;white-space:pre}
@media(prefers-reduced-motion:reduce){.f{animation:none!important}.end{visibility:visible}}
tspan[class]{fill-opacity:1;stroke:none}
%s</style>"""

Row = tuple[tuple[str, str], ...]  # texts and their tones
Screen = tuple[Row, ...]


def screens(command: list[str]) -> Iterator[tuple[float, Screen]]:
    """Run a command in a terminal, and give what it shows, with the seconds since its start.

    Raises:
        SystemExit: the command fails.
    """
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, started = pyte.ByteStream(screen), time.monotonic()
    terminal, of_command = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), of_command)
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **ends)
    os.close(of_command)
    while data := _read(terminal):
        stream.feed(data.replace(str(Path.home()).encode(), b"~"))  # whose it is says nothing
        yield time.monotonic() - started, tuple(_row(screen, y) for y in range(ROWS))
    os.close(terminal)
    if code := process.wait():
        sys.exit(f"{' '.join(command)} ended with {code}: nothing is drawn")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def _row(screen: pyte.Screen, y: int) -> Row:
    """A line of the screen; what has no tone here is as the rest."""
    cells = [screen.buffer[y][x] for x in range(COLUMNS)]
    runs = groupby(cells, key=lambda cell: _tone(cell.fg))
    row = [("".join(cell.data for cell in run), tone) for tone, run in runs]
    return tuple(row) if any(text.strip() for text, _ in row) else ()


def _tone(colour: str) -> str:
    """A named colour's tone; of others grey and green, as for the rest of a bar and its length."""
    if len(colour) == 6 and set(colour) <= set("0123456789abcdef"):
        return "e" if colour[:2] == colour[2:4] == colour[4:] else "c"
    return TONES.get(colour, "")


def picture(title: str, shown: list[tuple[float, Screen]]) -> Picture:
    """The screens of the last minute, one after another; the last one where nothing may move."""
    begins = [max(seconds - shown[-1][0] + SECONDS, 0) for seconds, _ in shown]
    length = SECONDS + HOLD * FASTER
    ends = [*begins[1:], length]
    drawn = Picture(48 + HIGH * ROWS, title, width=round(40 + WIDE * COLUMNS))
    drawn.text(20, 26, f"$ {title}", "mono strong")
    frames = []
    for y in range(ROWS):
        times = zip(begins, ends, (screen[y] for _, screen in shown), strict=True)
        for row, run in groupby(times, key=lambda each: each[2]):
            parts = list(run)
            begin, end = 100 * parts[0][0] / length, 100 * parts[-1][1] / length
            if row and end > 0:
                name, is_last = f"a{len(frames)}", end == 100
                hidden = "" if is_last else f"{end:.2f}%{{visibility:hidden}}"
                frames.append(f"@keyframes {name}{{{begin:.2f}%{{visibility:visible}}{hidden}}}")
                _draw(drawn, y, row, name, is_last)
    drawn.parts.insert(0, STYLE % (length / FASTER, "\n".join(frames)))
    return drawn


def _draw(drawn: Picture, y: int, row: Row, name: str, is_last: bool) -> None:
    spans = "".join(
        f'<tspan class="{tone}">{escape(text)}</tspan>' if tone else escape(text)
        for text, tone in row
    )
    style = f'class="mono f{" end" if is_last else ""}" style="animation-name:{name}"'
    size = f'x="20" y="{56 + HIGH * y}" textLength="{WIDE * COLUMNS:g}"'
    drawn.parts.append(f'<text {size} lengthAdjust="spacingAndGlyphs" {style}>{spans}</text>')


def main(path: Path, command: list[str]) -> None:
    """Run a command, and write the picture of its last minute."""
    shown: list[tuple[float, Screen]] = []
    for seconds, screen in screens(command):
        if shown and (screen == shown[-1][1] or seconds < shown[-1][0] + 0.5):
            shown[-1] = (shown[-1][0], screen)  # two screens per second, each as it was at its end
        else:
            shown.append((seconds, screen))
    path.write_text(picture(" ".join(command), shown).svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

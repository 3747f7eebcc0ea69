"""Tables of measurements, on the terminal and as markdown, and their provenance."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

Value = str | float | int | None
LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "flax", "torch", "numpy")


@dataclass
class Table:
    """Rows of the same columns, with notes such as skipped peers, and failures."""

    title: str
    rows: list[dict[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def print(self) -> None:
        grid = RichTable(title=self.title, title_justify="left")
        for column in self._columns():
            grid.add_column(column, justify="left" if column == "peer" else "right")
        for row in self.rows:
            grid.add_row(*map(_format, row.values()))
        console = Console(width=120)
        failures = (f"[red]{failure}[/]" for failure in self.failures)
        console.print(grid, *self.notes, *failures, sep="\n")

    def markdown(self) -> str:
        columns = self._columns()
        lines = [columns, [":--", *["--:"] * (len(columns) - 1)]]
        lines += [[*map(_format, row.values())] for row in self.rows]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", grid, *self.notes, *self.failures]) + "\n"

    def _columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []


def _format(value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def save(name: str, tables: list[Table], source: dict[str, str], folder: Path) -> Path:
    """Write <date>-<name>-<hardware>.json and .md; returns that path without a suffix."""
    hardware = re.sub(r"\W+", "-", re.sub(r"\(.*?\)", "", source["hardware"])).strip("-").lower()
    stem = folder / f"{source['date']}-{name}-{hardware}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {**source, "tables": [asdict(table) for table in tables]}
    stem.with_name(stem.name + ".json").write_text(json.dumps(record, indent=1) + "\n")
    header = "\n".join(f"- {key}: {value}" for key, value in source.items())
    body = "\n".join(table.markdown() for table in tables)
    stem.with_name(stem.name + ".md").write_text(f"# {name}\n\n{header}\n\n{body}")
    return stem


def provenance() -> dict[str, str]:
    """The hardware and the software versions of a measurement."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "not installed"
    return {
        "hardware": hardware(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def hardware() -> str:
    """The GPUs, if any, and the processor with its number of cores."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return ", ".join([*filter(None, gpus), f"{_processor()}, {os.cpu_count()} cores"])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name", platform.machine())
    wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    features = sorted(wanted & set(fields.get("flags", "").split()))
    return f"{name} ({', '.join(features)})" if features else name

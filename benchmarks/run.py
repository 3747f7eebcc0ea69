"""Time the zoo side by side with its peers, and save the results.

python -m benchmarks.run transformer

Without names, all benchmarks run. The tables are printed, and saved as JSON and markdown under
benchmarks/results/.
"""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

import benchmarks.checkpoint
import benchmarks.engines
import benchmarks.ensemble
import benchmarks.example
import benchmarks.generate
import benchmarks.lora
import benchmarks.memory
import benchmarks.mlp
import benchmarks.programs
import benchmarks.quantized
import benchmarks.recipe
import benchmarks.rnn
import benchmarks.speculative
import benchmarks.startup
import benchmarks.transformer
from benchmarks.report import Table, provenance, save
from benchmarks.timing import Timing

Name = Literal[
    "transformer",
    "rnn",
    "mlp",
    "ensemble",
    "example",
    "remat",
    "vocabulary",
    "programs",
    "rnn-memory",
    "startup",
    "pipeline",
    "checkpoint",
    "generate",
    "engines",
    "speculative",
    "lora",
    "quantized",
]


@dataclass(frozen=True)
class Config:
    """Time the zoo side by side with its peers, and save the results."""

    names: Annotated[tuple[Name, ...], tyro.conf.Positional] = get_args(Name)
    """Benchmarks to run."""
    results: Path = Path(__file__).parent / "results"
    """Folder for the results."""
    timing: Timing = field(default_factory=Timing)
    transformer: benchmarks.transformer.Options = field(
        default_factory=benchmarks.transformer.Options
    )
    rnn: benchmarks.rnn.Options = field(default_factory=benchmarks.rnn.Options)
    mlp: benchmarks.mlp.Options = field(default_factory=benchmarks.mlp.Options)
    ensemble: benchmarks.ensemble.Options = field(default_factory=benchmarks.ensemble.Options)
    example: benchmarks.example.Options = field(default_factory=benchmarks.example.Options)
    remat: benchmarks.memory.RematOptions = field(default_factory=benchmarks.memory.RematOptions)
    vocabulary: benchmarks.memory.VocabularyOptions = field(
        default_factory=benchmarks.memory.VocabularyOptions
    )
    programs: benchmarks.programs.Options = field(default_factory=benchmarks.programs.Options)
    checkpoint: benchmarks.checkpoint.Options = field(default_factory=benchmarks.checkpoint.Options)
    rnn_memory: benchmarks.rnn.MemoryOptions = field(default_factory=benchmarks.rnn.MemoryOptions)
    generate: benchmarks.generate.Options = field(default_factory=benchmarks.generate.Options)
    engines: benchmarks.engines.Options = field(default_factory=benchmarks.engines.Options)
    speculative: benchmarks.speculative.Options = field(
        default_factory=benchmarks.speculative.Options
    )
    lora: benchmarks.lora.Options = field(default_factory=benchmarks.lora.Options)
    quantized: benchmarks.quantized.Options = field(default_factory=benchmarks.quantized.Options)


BENCHMARKS: dict[Name, Callable[[Config], list[Table]]] = {
    "transformer": lambda config: benchmarks.transformer.measure(config.transformer, config.timing),
    "rnn": lambda config: benchmarks.rnn.measure(config.rnn, config.timing),
    "mlp": lambda config: benchmarks.mlp.measure(config.mlp, config.timing),
    "ensemble": lambda config: benchmarks.ensemble.measure(config.ensemble, config.timing),
    "example": lambda config: benchmarks.example.measure(config.example, config.timing),
    "remat": lambda config: benchmarks.memory.measure_remat(config.remat, config.timing),
    "vocabulary": lambda config: benchmarks.memory.measure_vocabulary(config.vocabulary),
    "programs": lambda config: benchmarks.programs.measure(config.programs),
    "checkpoint": lambda config: benchmarks.checkpoint.measure(config.checkpoint, config.timing),
    "rnn-memory": lambda config: benchmarks.rnn.measure_memory(config.rnn_memory),
    "startup": lambda config: benchmarks.startup.measure(),
    "pipeline": lambda config: benchmarks.recipe.measure_pipeline(config.timing),
    "generate": lambda config: benchmarks.generate.measure(config.generate, config.timing),
    "engines": lambda config: benchmarks.engines.measure(config.engines, config.timing),
    "speculative": lambda config: benchmarks.speculative.measure(config.speculative, config.timing),
    "lora": lambda config: benchmarks.lora.measure(config.lora, config.timing),
    "quantized": lambda config: benchmarks.quantized.measure(config.quantized),
}


def main(config: Config) -> None:
    """Run, print and save; exit with 1 if there is a failure, such as peers that disagree."""
    command = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance()}
    failed = False
    for name in config.names:
        tables = BENCHMARKS[name](config)
        save(name, tables, source, config.results)
        failed |= any(table.failures for table in tables)
    sys.exit(failed)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers share a GPU
    main(tyro.cli(Config))

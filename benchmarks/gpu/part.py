"""The process of one part: `python -m benchmarks.gpu.part MODULE FUNCTION OPTIONS FILE`.

Calls a function of this package with the options, given as JSON, and writes the result to the file.
A separate process releases all of its memory, and can be killed when its time is over.
"""

import importlib
import json
import sys
from pathlib import Path

from benchmarks import stand_ins


def main(module: str, function: str, options: str, file: str) -> None:
    stand_ins.install()
    call = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    Path(file).write_text(json.dumps(call(**json.loads(options))))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run the campaign, or print what was recorded of it: ``python -m tests.campaign --help``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as under pytest: `import problems`

import torch

from . import registry


def main() -> int:
    """Return 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("smoke", help="run the bounded form of every part")
    for name in registry.PARTS:
        part = registry.load(name)
        own = commands.add_parser(name, help=(part.__doc__ or "").splitlines()[0])
        own.add_argument("--record", action="store_true", help="write the result to tests/campaign/results")
        part.arguments(own)
    args = parser.parse_args()
    torch.set_num_threads(1)

    if args.command is None:
        results = {name: registry.read(name) for name in registry.PARTS}
        print("Recorded full runs (tests/campaign/results):")
    elif args.command == "smoke":
        results = {name: registry.smoke(name) for name in registry.PARTS}
    else:
        results = {args.command: registry.full(args.command, args)}
        if args.record:
            result = results[args.command]
            print("recorded in", registry.write(result.pop("record", args.command), result))
    failures = [line for result in results.values() if result for line in result["failures"]]
    for line in failures:
        print("FAILED", line)
    print(registry.table(results))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

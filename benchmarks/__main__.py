"""Run all benchmarks, one after the other, each in a process of its own.

``python -m benchmarks`` passes its options (``--smoke``, ``--rounds N``, ``--out FOLDER``, ``--device cuda``) on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from ._common import ROOT, Place

SCRIPTS = (
    "against_peers", "memory_vs_k", "tasks", "adjoints", "adjoints_vs_k", "implicit_peers", "large_models", "scale",
    "first_call", "passes",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Return 0 if all went well."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cpu")
    Place.choose(parser.parse_known_args(argv)[0].device)
    failed = []
    for script in SCRIPTS if Place.is_host() else SCRIPTS[:-1]:  # `scale` runs ranks on the CPU
        print(f"\n== benchmarks.{script}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *argv], cwd=ROOT, check=False).returncode:
            failed.append(script)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

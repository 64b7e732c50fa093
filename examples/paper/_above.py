"""Make the folder above importable: the scripts of this folder share its `_run.py` and `_data.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

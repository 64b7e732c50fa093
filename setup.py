"""Makes the wheel reproducible: every file in it carries this date, unless SOURCE_DATE_EPOCH names another.

All else is in pyproject.toml.
"""

import os

from setuptools import setup

os.environ.setdefault(
    "SOURCE_DATE_EPOCH", "315532800"
)  # the first of January 1980, where the dates of a zip file begin
setup()

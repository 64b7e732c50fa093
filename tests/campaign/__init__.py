"""Long campaigns: checks of the library that are too expensive for every run of the tests.

    python -m tests.campaign                      what was recorded, as a table
    python -m tests.campaign smoke                the bounded part of everything, as the ordinary tests run it
    python -m tests.campaign fuzz --count 10000   one part in full; `--record` writes it to `results/`

A part is a module of this package, named in `registry.PARTS`.
"""

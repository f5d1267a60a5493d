"""Tiles by measurement: `table.py` what was found, `search.py` how, `runner.py` on what. See README.md."""

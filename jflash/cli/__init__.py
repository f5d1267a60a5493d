"""The command line: `jflash check`, `jflash explain`, `jflash bench` and `jflash tune`."""

from jflash.cli.command import main as main

"""`python -m jflash.cli`."""

import sys

from jflash.cli.command import main

sys.exit(main())

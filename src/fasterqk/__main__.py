"""``python -m fasterqk`` is the command line."""

import sys

from fasterqk.cli.main import main

sys.exit(main())

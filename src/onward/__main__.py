"""``python -m onward`` is ``onward``."""

import sys

from onward.shell.main import main

sys.exit(main())

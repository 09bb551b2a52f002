"""`python -m threefold_parity`."""

import sys

from threefold_parity.command import main

sys.exit(main())

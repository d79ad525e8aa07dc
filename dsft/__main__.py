"""`python -m dsft`: the same as `dsft`."""

import sys

from dsft.cli import main

sys.exit(main())

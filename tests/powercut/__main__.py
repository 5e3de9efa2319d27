"""python3 -m tests.powercut [--rounds N] [--seed S] [--raw]"""

import sys

from tests.powercut.main import main

sys.exit(main())

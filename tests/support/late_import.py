"""A module whose import waits for the file in ``SPLITSERVE_TEST_IMPORT_AFTER``. Not a test module."""

import os
import time
from pathlib import Path

while not Path(os.environ["SPLITSERVE_TEST_IMPORT_AFTER"]).exists():
    time.sleep(0.01)

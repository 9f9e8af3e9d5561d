"""`python -m piper`: the same as `piper`."""

import sys

from piper.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

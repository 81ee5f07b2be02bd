"""Plan how many workers to pay for, from a training's result, as docs/planning.md says.

python jobs/plan.py --summary output/flights-model/_result.json --link "1 Gbit/s"
"""

import sys

from sparkdl.jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

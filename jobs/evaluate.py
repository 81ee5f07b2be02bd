"""Measure a saved model on a table, as docs/jobs.md says.

python jobs/evaluate.py --config conf/flights.yaml
spark-submit --master yarn jobs/evaluate.py --config conf/flights.yaml
"""

import sys

from sparkdl.jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))

"""Train a network on a table, as docs/jobs.md says.

python jobs/train.py --config conf/flights.yaml --estimator.epochs 3
spark-submit --master yarn jobs/train.py --config conf/flights.yaml
"""

import sys

from sparkdl.jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""Train a network on a table, as docs/jobs.md says.

python jobs/train.py --config conf/flights.yaml --estimator.epochs 3
spark-submit --master yarn jobs/train.py --config conf/flights.yaml
"""

import sys

from sparkdl.jobs.train import main

if __name__ == "__main__":
    sys.exit(main())

"""Write a saved model's predictions for a table, as docs/jobs.md says.

python jobs/predict.py --config conf/flights.yaml
spark-submit --master yarn jobs/predict.py --config conf/flights.yaml
"""

import sys

from sparkdl.jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))

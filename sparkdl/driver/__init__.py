"""The driver's half of a run: an initial center goes in, a trained module comes out.

Knows nothing of Spark: whoever starts the workers is passed in as ``launch``.
"""

from sparkdl.driver.lifecycle import Launch as Launch
from sparkdl.driver.lifecycle import Outcome as Outcome
from sparkdl.driver.lifecycle import RunOptions as RunOptions
from sparkdl.driver.lifecycle import as_builder as as_builder
from sparkdl.driver.lifecycle import initial_center as initial_center
from sparkdl.driver.lifecycle import run as run
from sparkdl.driver.resizing import Slots as Slots
from sparkdl.driver.serving import Observers as Observers

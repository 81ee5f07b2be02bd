"""How the rows of a column arrive, and how they become numbers."""

from sparkdl.encodings.encoding import UNKNOWN as UNKNOWN
from sparkdl.encodings.encoding import Encoding as Encoding
from sparkdl.encodings.images import IMAGE as IMAGE
from sparkdl.encodings.known import arriving_as as arriving_as
from sparkdl.encodings.known import named as named
from sparkdl.encodings.known import register as register
from sparkdl.encodings.linalg import VECTOR as VECTOR
from sparkdl.encodings.numbers import BYTES as BYTES
from sparkdl.encodings.numbers import NUMBERS as NUMBERS
from sparkdl.encodings.pixels import PIXELS as PIXELS

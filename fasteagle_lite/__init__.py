"""FastEagle Lite: drafting in speculative decoding, small enough to read and fast enough to watch.

from fasteagle_lite import load, race
engine = load()                                # target and drafters, shared by all lanes
prefix = engine.prefill("Why is the sky blue?", max_new_tokens=64)
"""

from .decode import Prefix, decode, prefill
from .engine import Engine, LaneSpec
from .errors import UserError
from .race import race
from .sampling import Sampling
from .trace import Round, Trace
from .tree import DraftTree, TreeConfig

__version__ = "0.1.0"
load = Engine.load

__all__ = [
    "DraftTree", "Engine", "LaneSpec", "Prefix", "Round", "Sampling", "Trace", "TreeConfig", "UserError",
    "decode", "load", "prefill", "race",
]  # fmt: skip

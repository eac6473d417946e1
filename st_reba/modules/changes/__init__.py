"""What can be changed while a language model reads: small frozen objects, which any module takes and saves."""

from .attend_both_ways import AttendBothWays
from .before_feed_forward import BeforeFeedForward
from .change import Change, Fitted, combined, from_settings, register
from .early_exit import EarlyExit
from .prepend import Prepend, PrependBlocks
from .reroute import Reroute
from .steer import Steer

for kind in (AttendBothWays, BeforeFeedForward, EarlyExit, Prepend, PrependBlocks, Reroute, Steer):
    register(kind)

__all__ = [
    "AttendBothWays",
    "BeforeFeedForward",
    "Change",
    "EarlyExit",
    "Fitted",
    "Prepend",
    "PrependBlocks",
    "Reroute",
    "Steer",
    "combined",
    "from_settings",
    "register",
]

"""From texts to vectors: layouts, passes of a language model, and methods."""

from st_reba.hub.compat import make_known

from . import modules
from .lm import attention

attention.register()
make_known(*(getattr(modules, name) for name in modules.SAVED))

"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here.

`gpu_align.tools.recipes` learns, merges and measures them.
"""

from .pack import PackError as PackError
from .pack import RecipePack as RecipePack
from .tokenize import Observed as Observed
from .tokenize import Recipe as Recipe

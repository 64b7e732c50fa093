"""Inner loops over ranks: tasks divided among them, hypergradients averaged, lower losses of data spread over them.

A thin layer on `torch.distributed`. Every rank runs its own inner loops; what crosses the network is one pass over the
upper variables per upper iteration, however long the loops are. Where no process group is there (a script started
without `torchrun`), everything here works on the one process and communicates nothing.
"""

from ._averager import Averager, average
from ._checkpoint import load, save
from ._data_parallel import DataParallel
from ._ranks import shard

__all__ = ["Averager", "DataParallel", "average", "load", "save", "shard"]

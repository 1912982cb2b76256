"""Loaders, batches and devices.

``feed.py``: what the loop trains from. ``opening.py``: which kind of loader it is. ``indexed.py``: datasets with
indices. ``iterated.py``: everything else. ``workers.py``: the DataLoader that is really run. ``draws.py``: the
generators that data code draws from. ``order.py``: a user's own sampler. ``attributes.py``: what loaders keep between
epochs. ``position.py``: a loader's state as JSON. ``ahead.py``: whether there is more. ``moving.py``: batches to a
device. ``alike.py``: whether two are the same. ``checking.py``: batches that are not like the first.
"""

from .ahead import Ahead as Ahead
from .checking import BatchSpec as BatchSpec
from .checking import check_batch as check_batch
from .feed import Feed as Feed
from .feed import limit as limit
from .moving import device_of as device_of
from .moving import prefetch as prefetch
from .moving import to_device as to_device
from .opening import open_feed as open_feed
from .opening import overfit as overfit

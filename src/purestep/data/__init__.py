"""Loaders, batches and devices.

``feed.py``: what the loop trains from. ``opening.py``: which kind of loader it is. ``indexed.py``: datasets with
indices. ``iterated.py``: everything else. ``workers.py``: the DataLoader that is really run. ``draws.py``: the
generators that data code draws from. ``order.py``: a user's own sampler. ``attributes.py``: what loaders keep between
epochs. ``position.py``: a loader's state as JSON. ``ahead.py``: whether there is more. ``moving.py``: batches to a
device. ``alike.py``: whether two are the same. ``checking.py``: batches that are not like the first.
"""

from .batch_spec import BatchSpec as BatchSpec
from .batch_spec import check_batch as check_batch
from .device import device_of as device_of
from .device import prefetch as prefetch
from .device import to_device as to_device
from .feed import Feed as Feed
from .feed import limit as limit
from .lookahead import Ahead as Ahead
from .open_feed import open_feed as open_feed
from .open_feed import overfit as overfit

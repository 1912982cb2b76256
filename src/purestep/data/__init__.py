"""Loaders, batches and devices.

open_feed        chooses the `Feed` for a loader
shares           feeds of one of several processes
feed             `Feed`: the batches of an epoch from any start, and the position as JSON
map_style        the feed of a DataLoader over a dataset with indices
sampler_order    the order of a user-defined sampler
iterable         feeds of lists, iterables and loaders with ``state_dict``
iterator         the feed of an iterator
workers          the DataLoader that runs, and its worker processes
random_state     torch's, numpy's and Python's generators, seeded and restored together
attribute_state  attributes of loaders that change between epochs
state_json       the state of a loader as JSON
peeking          an iterator with a look at the next element
equality         bitwise comparison of batches and orders
device           batches to a device
batch_spec       checks each batch against the first one
"""

from .attribute_state import Attributes as Attributes
from .batch_spec import BatchSpec as BatchSpec
from .batch_spec import check_batch as check_batch
from .device import device_of as device_of
from .device import prefetch as prefetch
from .device import to_device as to_device
from .feed import Feed as Feed
from .feed import limit as limit
from .open_feed import open_feed as open_feed
from .open_feed import overfit as overfit
from .peeking import Ahead as Ahead

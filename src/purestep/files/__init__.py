"""Files that are whole or not there, one writer for each directory, and the points at which tests make both fail.

A file written here appears under its name only after its bytes and its directory entry are on the disk. `OSError`s come
out as `WriteFailed`, which says the file, the reason and what to do.
"""

from .atomic import read_json as read_json
from .atomic import remove_tree as remove_tree
from .atomic import replacing as replacing
from .atomic import special_file as special_file
from .atomic import sync_directory as sync_directory
from .atomic import sync_file as sync_file
from .atomic import sync_tree as sync_tree
from .atomic import write_bytes as write_bytes
from .atomic import write_failed as write_failed
from .atomic import write_json as write_json
from .failpoints import POINTS as POINTS
from .failpoints import armed as armed
from .failpoints import failpoint as failpoint
from .lock import DirectoryLock as DirectoryLock

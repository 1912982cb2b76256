"""Atomic files, a lock for each directory, and failpoints for tests.

A file gets its name only after its bytes are on the disk. An `OSError` becomes a `WriteFailed` with the file, the
reason and the cure.

reading     open and read files that others may have put there
atomic      write, replace, flush and delete files
lock        `DirectoryLock`: one writer for each directory
failpoints  places where a test makes the disk, the process or the clock fail
"""

from .atomic import local_path as local_path
from .atomic import make_directory as make_directory
from .atomic import of_run as of_run
from .atomic import other_kind as other_kind
from .atomic import remove_tree as remove_tree
from .atomic import replacing as replacing
from .atomic import subdirectory as subdirectory
from .atomic import sync_directory as sync_directory
from .atomic import sync_file as sync_file
from .atomic import sync_tree as sync_tree
from .atomic import write_bytes as write_bytes
from .atomic import write_failed as write_failed
from .failpoints import failpoint as failpoint
from .failpoints import set_hook as set_hook
from .lock import DirectoryLock as DirectoryLock
from .lock import Holder as Holder
from .lock import is_locked as is_locked
from .lock import lock_holder as lock_holder
from .reading import LIMIT as LIMIT
from .reading import parsed_json as parsed_json
from .reading import read_json as read_json
from .reading import read_regular as read_regular
from .reading import regular as regular

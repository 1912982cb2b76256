"""Other forms of one state, and checks of the arguments of factories.

packed      a state as a few flat buffers, one for each dtype and label, with the tree as views
stacked     the states of an ensemble as one state with a leading dimension: `ps.stack`, `ps.member`
tree_json   a tree of tensors and plain values as JSON and bytes
entry_names names of the entries of vectors in a history
views       the weights to evaluate, of training or their average: `ps.view`
keywords    the arguments of a factory: unknown keywords, and checks that are part of a type
validation  is a value a count, a number, a finite number, and the errors that say so
"""

from .entry_names import base_name as base_name
from .entry_names import best_name as best_name
from .entry_names import entry_name as entry_name
from .entry_names import entry_place as entry_place
from .entry_names import vector_name as vector_name
from .keywords import Check as Check
from .keywords import at_least as at_least
from .keywords import in_range as in_range
from .keywords import known_keywords as known_keywords
from .stacked import member as member
from .stacked import stack as stack
from .validation import check_callable as check_callable
from .validation import check_choice as check_choice
from .validation import check_count as check_count
from .validation import check_range as check_range
from .validation import is_count as is_count
from .validation import is_number as is_number
from .validation import listed as listed
from .validation import nearest as nearest
from .validation import nearest_names as nearest_names
from .validation import usable_device as usable_device
from .validation import whole as whole
from .views import view as view

"""Operations in the order of the trace.

By default inductor moves each operation of a graph for inference, as which it takes a whole step, next to its first
reader. A gradient of a weight is a part of the flat vector of gradients, which is read at the end of a step: the
products for these gradients would move there, and the gradients of all activations, which they read, would live until
then (torch 2.11 to 2.14).

Test: `test_early_reductions.py`, ``test_the_gradient_of_the_logits_does_not_live_to_the_end``.
"""

OPTIONS = {"reorder_for_locality": False}
"""Options of inductor."""

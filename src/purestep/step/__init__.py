"""Train steps: the order of operations between a batch and the next state.

private copies of buffers -> forward under the precision policy -> mean x scale -> gradients -> accumulate x weight ->
[on the last micro-batch of a window: divide by weight and scale -> finite check -> `tx.update` (clipping is part of it)
-> EMA -> keep new or old on the finite flag -> empty the window] -> counters, scaler.

Decisions are made on the device: the host reads no tensor of a GPU. In an eager step on the CPU it reads.

program      `program`: a module, an objective and a transformation as pure steps
spec         types that the other modules share
init_state   `init`
gradient     forward and backward pass: of a training step
loss_checks  from what an objective returns to a `Loss`
sharpness    sharpness-aware minimization: a second gradient
microbatch   splitting of a batch inside one call
train_step   `train_step` and `flush`
exchange     a call's contributions of several processes
accumulation the window: adding a micro-batch, closing a full window
update       the update of a window or its rollback
counted_window  `counting`: a step that counts its position in the window on the host
random_draws seeds the generators for a step
inference    `eval_step` and `bind`
differentiable  the loss as a function of the parameters, for other derivatives; the gradient of a call alone
statistics   statistics of BatchNorm for given weights
batch_copy   copies of batch leaves that a model writes in place
"""

from .batch_copy import untouched as untouched
from .counted_window import counting as counting
from .differentiable import Parts as Parts
from .differentiable import check_divisible as check_divisible
from .differentiable import parts_for as parts_for
from .loss_checks import finite_mean as finite_mean
from .program import begun as begun
from .program import program as program
from .program import static_of as static_of
from .random_draws import drawn_in_step as drawn_in_step
from .sharpness import Sam as Sam
from .spec import IDENTITY as IDENTITY
from .spec import Accum as Accum
from .spec import Adding as Adding
from .spec import Closing as Closing
from .spec import Micro as Micro
from .spec import remember_unreached as remember_unreached
from .spec import unreached as unreached
from .spec import wide as wide
from .update import rate_names as rate_names

"""Which kernels run: the user's `isa` against what is built and what this processor can do. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.config import Isa
from kvist.errors import ConfigError
from kvist.kernels import cpu
from kvist.kernels.ops import Ops

NO_NATIVE = (
    "No native kernels can run on this machine, so kvist runs on its NumPy twin, which is many times slower; "
    "`kvist doctor` says what to do about it."
)


def select_ops(isa: Isa, num_threads: int, *, warn: Callable[[str], None], cpus: Sequence[int] = ()) -> Ops:
    """Ops for `isa`; "auto" takes the best there is and warns once when that is NumPy. With `cpus`, native threads are bound to
    them in order. Raises ConfigError for an `isa` that this machine or this build lacks."""
    chosen: str = isa
    if isa == "auto":
        native = cpu.available()
        if not native:
            warn(NO_NATIVE)
        chosen = native[0] if native else "numpy"
    if chosen == "numpy":
        if cpus:
            raise ConfigError("pin_threads binds the native kernels' threads to CPUs, and none run here; leave it out.")
        from kvist.kernels.reference import make_reference_ops

        return make_reference_ops(num_threads)
    return cpu.make_ops(chosen, num_threads, cpus)

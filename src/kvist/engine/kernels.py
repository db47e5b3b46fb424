"""Which kernels run: the user's `isa` against what is built and what this processor can do. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvist.config import Isa
from kvist.errors import ConfigError
from kvist.kernels.ops import Ops

NO_NATIVE = (
    "No native kernels are built for this machine, so kvist runs on its NumPy twin, which is many times slower; "
    "install a C++20 compiler and reinstall kvist, then see `kvist doctor`."
)


def select_ops(isa: Isa, num_threads: int, *, warn: Callable[[str], None]) -> Ops:
    """Ops for `isa`; "auto" takes the best there is and warns once when that is NumPy. Raises ConfigError for an `isa` that this
    machine or this build lacks."""
    native = () if isa == "numpy" else native_isas()
    if isa == "auto":
        if not native:
            warn(NO_NATIVE)
        chosen = native[0] if native else "numpy"
    elif isa != "numpy" and isa not in native:
        usable = ", ".join((*native, "numpy"))
        raise ConfigError(f"isa={isa} cannot run here: this processor or this build lacks it; usable are {usable}.")
    else:
        chosen = isa
    if chosen == "numpy":
        from kvist.kernels.reference import make_reference_ops

        return make_reference_ops(num_threads)
    from kvist.kernels.cpu import make_ops

    return make_ops(chosen, num_threads)


def native_isas() -> tuple[str, ...]:
    """Native builds that can run here, best first."""
    try:
        from kvist.kernels.cpu import available
    except ImportError:
        return ()
    return tuple(available())

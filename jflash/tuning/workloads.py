"""What is tuned: calls by their sizes, and those that the shipped tables come from."""

import dataclasses
from collections.abc import Iterator

from jflash.masks import And, Causal, Full, Mask, SlidingWindow
from jflash.testing.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call in 16 bits, by what can be written on a command line and in a table.

    Attributes:
      B, T, S, N, K, H, Hv: the dimensions.
      causal, window: as of `flash_attention`.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    def __post_init__(self):
        # JSON has lists alone.
        object.__setattr__(self, "window", self.window and tuple(self.window))

    @property
    def workload(self) -> Workload:
        sizes = {name: getattr(self, name) for name in ("B", "T", "S", "N", "K", "H", "Hv")}
        return Workload(name=str(self), dtype="bfloat16", mask=self._mask(), **sizes)

    def _mask(self) -> Mask:
        masks = [Causal()] if self.causal else []
        masks += [SlidingWindow(*self.window)] if self.window is not None else []
        return And(*masks) if len(masks) > 1 else masks[0] if masks else Full()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={getattr(self, name)}" for name in ("B", "T", "S", "N", "K", "H", "Hv"))
        window = "" if self.window is None else f" window={self.window[0]},{self.window[1]}"
        return f"{sizes} {'causal' if self.causal else 'full' if not window else ''}{window}".replace("  ", " ")


def shipped() -> Iterator[Call]:
    """The calls of the shipped tables: those of the speed records, 16384 tokens each, the longest first."""
    for T in (16384, 4096, 1024):
        for H in (64, 128, 256):
            for causal in (False, True):
                yield _call(T, N=2048 // H, H=H, causal=causal)
    for T in (16384, 8192):
        yield _call(T, N=32, K=8, H=128, causal=True)
    for T in (8192, 4096):
        for causal in (False, True):
            yield _call(T, N=16, H=192, Hv=128, causal=causal)
    yield _call(16384, N=16, H=128, window=(1023, 0))
    for T in (512, 256, 128):
        yield _call(T, N=16, H=64, causal=True)


def _call(T: int, *, N: int, H: int, K: int = 0, Hv: int = 0, **mask) -> Call:
    return Call(B=16384 // T, T=T, S=T, N=N, K=K or N, H=H, Hv=Hv or H, **mask)

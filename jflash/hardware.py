"""What a device is, as far as the choice of a backend and its tiles depends on it.

Shared memory per block is the opt-in maximum of the compute capability: CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability" (163 KiB at 8.0, 99 KiB at 8.6 and 8.9, 227 KiB at 9.0 and 10.0, 99 KiB at
12.0). Multiprocessor counts are those of the vendors' datasheets for the named part.
"""

import dataclasses

import jax

from jflash.errors import ArgumentError

_KIB = 1024
_SMEM_BYTES_PER_BLOCK = {
    "7.0": 96 * _KIB,
    "7.5": 64 * _KIB,
    "8.0": 163 * _KIB,
    "8.6": 99 * _KIB,
    "8.9": 99 * _KIB,
    "9.0": 227 * _KIB,
    "10.0": 227 * _KIB,
    "10.3": 227 * _KIB,
    "12.0": 99 * _KIB,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device.

    Attributes:
      name: the short name, as in `explain(..., hardware="h200")`.
      platform: JAX's name of the lowering platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: (major, minor) of a CUDA device, otherwise None.
      smem_bytes_per_block: shared memory one block can have, 0 where there is none.
      sm_count: multiprocessors, 0 where there are none.
    """

    name: str
    platform: str
    compute_capability: tuple[int, int] | None = None
    smem_bytes_per_block: int = 0
    sm_count: int = 0

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor}, {self.smem_bytes_per_block} bytes of shared memory)"


def _cuda(name: str, capability: str, sm_count: int) -> Hardware:
    major, minor = capability.split(".")
    return Hardware(
        name=name,
        platform="cuda",
        compute_capability=(int(major), int(minor)),
        # An unknown capability gets the smallest maximum of the table, so that a plan for it fits.
        smem_bytes_per_block=_SMEM_BYTES_PER_BLOCK.get(capability, min(_SMEM_BYTES_PER_BLOCK.values())),
        sm_count=sm_count,
    )


_KNOWN = {
    hardware.name: hardware
    for hardware in (
        Hardware(name="cpu", platform="cpu"),
        Hardware(name="tpu", platform="tpu"),
        _cuda("v100", "7.0", 80),
        _cuda("t4", "7.5", 40),
        _cuda("a100", "8.0", 108),
        _cuda("rtx3090", "8.6", 82),
        _cuda("l4", "8.9", 58),
        _cuda("rtx4090", "8.9", 128),
        _cuda("h100", "9.0", 132),
        _cuda("h200", "9.0", 132),
        _cuda("b200", "10.0", 148),
        _cuda("b300", "10.3", 148),
        _cuda("rtx5090", "12.0", 170),
    )
}


def names() -> tuple[str, ...]:
    """The names that `named` takes."""
    return tuple(_KNOWN)


def named(name: str) -> Hardware:
    """The hardware of this name.

    Raises:
      ArgumentError: no hardware has this name.
    """
    if name not in _KNOWN:
        raise ArgumentError("hardware", found=repr(name), wanted=f"one of {', '.join(_KNOWN)}")
    return _KNOWN[name]


def of_device(device: jax.Device) -> Hardware:
    """The hardware of a JAX device, read from what the device says of itself."""
    if device.platform != "gpu":
        return Hardware(name=device.platform, platform=device.platform)
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():
        return Hardware(name=device.device_kind, platform="rocm")
    return _cuda(device.device_kind, capability, int(getattr(device, "core_count", 0)))


def present() -> Hardware:
    """The hardware that JAX computes on by default here."""
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return of_device(default)
    return of_device(jax.local_devices(backend=default)[0])

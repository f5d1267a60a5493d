"""Pallas' interpreter of Mosaic GPU kernels on the CPU, completed so that it runs our kernels and finds their races.

`with interpreted(): out = jax.block_until_ready(jax.jit(f)(*args))`, or `interpret(f, *args)`. The interpreter of JAX
runs each warpgroup as a thread, with barriers, TMA and a race detector that knows the generic and the async proxy. Here
it learns, on top of that:

- `pl.run_state` over `plgpu.ACC.init`, `pl.run_scoped` without scratch, wgmma with its left side in registers, stores
  to an accumulator;
- `copy_smem_to_gmem` with `reduction_op` or `predicate`, and `plgpu.atomic_add` and the like;
- that wgmma reads shared memory through the async proxy until it is waited for: a slot released or overwritten too
  early, and a store without `commit_smem` before the wgmma that reads it, are races;
- that members of a `RefUnion` which hold the same elements at the same bytes are one memory;
- that TMA copies contiguous memory without a swizzle as a run of bytes, so that it does not stop at the end of a row.

It does not see what depends on layouts in registers, and it runs the blocks of a grid one cluster after the other. A
slot released too early is only found where something is loaded into it again: run more steps than there are stages.

This is private API of JAX: it may only be used in tests. SUPPORTED_JAX says with which versions it was tried.
"""

import collections
import contextlib
import functools
import math
import re
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic.interpret import race_detection_state as generic_race_detection_state
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu
from watchdog import watchdog

# The versions of constraints.txt and constraints-newest-jax.txt.
SUPPORTED_JAX = ("0.11.2", "0.12.0.1")

_RACE = "RACE DETECTED"
_REGS = int(memory.get_memory_space_idx(gpu_core.MemorySpace.REGS))
_SMEM = int(memory.get_memory_space_idx(gpu_core.MemorySpace.SMEM))


class RaceError(Exception):
    """Two accesses to the same memory, one of them a write, that nothing orders."""


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True, timeout_s: float = 60) -> Iterator[None]:
    """Interprets every Mosaic GPU kernel that is called inside. The results must be ready before the end.

    Args:
        detect_races: raise `RaceError` for a race; without it a run is up to a fifth faster.
        timeout_s: after so long a deadlock is assumed, and the process ended with the stacks of its threads.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watchdog(timeout_s))
        for patch in _patches():
            stack.enter_context(patch)
        stack.enter_context(plgpu.force_gpu_interpret_mode(params))
        try:
            yield
            jax.effects_barrier()
        except Exception as error:
            gpu_callbacks.reset_gpu_interpret_mode_state()
            if _RACE in str(error):
                raise RaceError(_race(str(error))) from error
            raise


def interpret(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of `f(*args)` with its kernels interpreted; the options are those of `interpreted`."""
    with interpreted(**options):
        return jax.block_until_ready(jax.jit(f)(*args))


def _race(text: str) -> str:
    """The two accesses, each with its line of code, out of the traces and clocks around them."""
    lines = [line for line in text[text.rindex(_RACE) :].splitlines() if re.match(r"\s*(RACE|read of|write of)", line)]
    return "\n".join(lines[:3])


def _patches() -> list[Any]:
    patch = unittest.mock.patch.object
    patches = [
        patch(jaxpr_interpret, "JaxprInterpreter", _Interpreter),
        patch(jaxpr_interpret, "resolve_ref", _resolve_ref),
        patch(memory, "GPUSharedMemory", _SharedMemory),
        patch(gpu_callbacks, "GPURaceDetectionState", _Races),
        patch(gpu_callbacks, "wgmma", _wgmma),
        patch(gpu_callbacks, "wgmma_accumulator_deref", _wgmma_accumulator_deref),
        patch(gpu_callbacks, "copy_gmem_to_smem", _copy_gmem_to_smem),
        patch(gpu_callbacks, "copy_smem_to_gmem", _copy_smem_to_gmem),
    ]
    if not hasattr(memory, "BarrierReallocationChecker"):  # JAX 0.11
        # It insists that a thread waits for all completions of a barrier; 0.12 only where another barrier follows.
        patches.append(patch(memory.Barrier, "deallocate", _deallocate_barrier))
    if not hasattr(race_detection_state.GPURaceDetectionState, "on_race"):  # JAX 0.11
        # It prints a race and goes on; 0.12 raises it.
        for module in (generic_race_detection_state, race_detection_state):
            patches.append(patch(module, "print", _raise_race, create=True))
    return patches


def _raise_race(text: str) -> None:
    raise RuntimeError(text)


def _deallocate_barrier(self: memory.Barrier) -> None:
    with self.cv:
        self.ref_count -= 1
        if self.ref_count == 0 and self.arrivals_count != 0:
            raise ValueError(f"Barrier deallocated with {self.arrivals_count} arrivals pending.")


class _Races(race_detection_state.GPURaceDetectionState):
    """Without registers: they are private to a thread, but the numbers of their buffers come back in the next block."""

    def check_read(self, thread, clock, buffer_key, *args, **kwargs):
        if int(buffer_key.memory_space_id) != _REGS:
            super().check_read(thread, clock, buffer_key, *args, **kwargs)

    def check_write(self, thread, clock, buffer_key, *args, **kwargs):
        if int(buffer_key.memory_space_id) != _REGS:
            super().check_write(thread, clock, buffer_key, *args, **kwargs)


class _SharedMemory(memory.GPUSharedMemory):
    """With the wgmmas in flight of each thread: vector clocks that the thread takes over when it waits for them."""

    def reset_per_cluster_state(self):
        super().reset_per_cluster_state()
        with self.lock:
            self.wgmmas_in_flight = collections.defaultdict(collections.deque)

    def start_wgmma(self, thread):
        """The clock at which a new wgmma reads shared memory."""
        with self.lock:
            clock = self.incr_clock(thread, take_lock=False)
            in_flight = self.wgmmas_in_flight[thread]
            if in_flight:  # wgmmas of a warpgroup end in order
                clock.update(in_flight[-1])
            # It needs a place of its own in the clocks. That of a warp is free, since only a whole warpgroup can wgmma.
            clock.inc(self.thread_to_vc_position(thread.warp(0)))
            in_flight.append(clock)
            return clock.copy()

    def wait_wgmma(self, thread, n):
        with self.lock:
            in_flight = self.wgmmas_in_flight[thread]
            while len(in_flight) > n:
                self.clocks[thread].update(in_flight.popleft())


_stock_wgmma = gpu_callbacks.wgmma
_stock_wgmma_accumulator_deref = gpu_callbacks.wgmma_accumulator_deref


@gpu_callbacks.fail_on_exception
def _wgmma(*, token, mesh_location, thread, source_info=None, **operands):
    shared = gpu_callbacks._get_shared_memory()
    if shared.detect_races:
        clock = shared.start_wgmma(thread)
        for name in ("a", "b"):
            key, access = _key_and_access(operands, name)
            if int(key.memory_space_id) == _SMEM:
                gpu_callbacks.get_races().check_read(
                    thread, clock.async_smem_clock.copy(), key, access, source_info=source_info
                )
    return _stock_wgmma(token=token, mesh_location=mesh_location, thread=thread, source_info=source_info, **operands)


@gpu_callbacks.fail_on_exception
def _wgmma_accumulator_deref(*, token, thread, wait_n, **kwargs):
    if wait_n is not None:
        _wait_wgmma(token=token, thread=thread, n=wait_n)
    return _stock_wgmma_accumulator_deref(token=token, thread=thread, wait_n=wait_n, **kwargs)


@gpu_callbacks.fail_on_exception
def _wait_wgmma(*, token, thread, n):
    shared = gpu_callbacks._get_shared_memory()
    if shared.detect_races:
        shared.wait_wgmma(thread, int(n))
    return token


def _key_and_access(operands, name):
    key = gpu_callbacks.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
    transforms = gpu_callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
    return key, gpu_callbacks._get_shared_memory().access(key, jax.tree.map(int, transforms))


# TMA.


def _is_swizzled(transforms) -> bool:
    return any(isinstance(transform, gpu_core.UnswizzleRef) for transform in transforms)


def _bounds(access) -> list[tuple[int, int]]:
    """Start and size along each axis of the buffer; an index is a slice of size 1."""
    pairs = []
    for index in access.range:
        if isinstance(index, slice):
            start = int(index.start or 0)
            pairs.append((start, int(index.stop) - start))
        else:
            pairs.append((int(index), 1))
    return pairs


def _run_of_bytes(access, shape) -> tuple[int, int] | None:
    """Offset and number of elements, if the part is contiguous but ends outside of `shape`; then Mosaic GPU copies a
    run of bytes, and only the end of the whole array stops it (`is_simple_contiguous_copy` in its launch_context.py).
    """
    bounds = _bounds(access)
    if all(start + size <= axis for (start, size), axis in zip(bounds, shape, strict=True)):
        return None
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    expected = 1
    for (_, size), stride in zip(reversed(bounds), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True)), expected


class _Load(gpu_callbacks.AsyncCopyGmemToSmemTask):
    """Reads a run of bytes past the end of a row, where TMA does."""

    is_run_of_bytes = False

    def __call__(self, tma_thread_id):
        shared = gpu_callbacks._get_shared_memory()
        shape, dtype = shared.buffer_shape_and_dtype(self.src_allocation_key)
        run = _run_of_bytes(self.src_access, shape) if self.is_run_of_bytes else None
        if run is None:
            return super().__call__(tma_thread_id)
        offset, size = run
        self.pre_read(tma_thread_id, shared)
        everything = shared.access(self.src_allocation_key, ())
        array, _, _ = shared.get_buffer_content(
            self.src_allocation_key, everything, self.thread, logging_info=self.logging_info
        )
        found = array.reshape(-1)[offset : offset + size]
        # What TMA leaves out keeps what was there before, which nobody may rely on.
        value = np.concatenate([found, np.full(size - found.size, _nonsense(dtype), dtype)])
        self.post_read(tma_thread_id, shared)
        shared.store_buffer_content(
            self.dst_allocation_key,
            self.dst_access,
            value.reshape(self.dst_access.shape),
            self.thread,
            logging_info=self.logging_info,
        )
        self.post_write(tma_thread_id, shared)


def _nonsense(dtype):
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else -1


class _Store(gpu_callbacks.AsyncCopySmemToGmemTask):
    """Refuses a run of bytes past the end of a row, and can reduce."""

    is_run_of_bytes = False
    reduction_op = None

    def __call__(self, tma_thread_id):
        shared = gpu_callbacks._get_shared_memory()
        shape, _ = shared.buffer_shape_and_dtype(self.dst_allocation_key)
        if self.reduction_op is None:
            run = _run_of_bytes(self.dst_access, shape) if self.is_run_of_bytes else None
            if run is not None:
                offset, size = run
                bounds = _bounds(self.dst_access)
                inside = math.prod(max(0, min(size, axis - start)) for (start, size), axis in zip(bounds, shape))
                if min(size, math.prod(shape) - offset) > inside:
                    raise ValueError(
                        f"A copy to [{self.dst_access}] of an array of shape {tuple(shape)} is one run of bytes: TMA"
                        " does not stop it at the end of the row, and it overwrites what follows."
                    )
            return super().__call__(tma_thread_id)
        self.pre_read(tma_thread_id, shared)
        value, _, _ = shared.get_buffer_content(
            self.src_allocation_key, self.src_access, self.thread, logging_info=self.logging_info
        )
        if shared.detect_races:  # as post_read, but for the check: reductions from several blocks do not race
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
        clipped = gpu_callbacks._clip_store_to_shape(self.dst_access, value, tuple(shape))
        if clipped is not None:
            _reduce(self.dst_allocation_key, *clipped, self.reduction_op, self.thread, self.logging_info)
        self.post_write(tma_thread_id, shared)


_reduce_lock = threading.Lock()
_REDUCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _reduce(key, access, value, reduction_op, thread, logging_info):
    """Atomic, and not seen by the race detector."""
    shared = gpu_callbacks._get_shared_memory()
    with _reduce_lock:
        old, _, _ = shared.get_buffer_content(key, access, thread, logging_info=logging_info)
        new = _REDUCTIONS[reduction_op](old, np.asarray(value)).astype(old.dtype)
        shared.store_buffer_content(key, access, new, thread, logging_info=logging_info)


def _copy(mesh_location, thread, source_info, operands) -> dict[str, Any]:
    """What JAX's tasks of copies take, in either direction."""
    shared = gpu_callbacks._get_shared_memory()
    (src, src_access), (dst, dst_access) = (_key_and_access(operands, side) for side in ("src", "dst"))
    return {
        "mesh_location": mesh_location,
        "thread": thread,
        "src_allocation_key": src,
        "src_access": src_access,
        "dst_allocation_key": dst,
        "dst_access": dst_access,
        "source_info": source_info,
        "clock": shared.incr_clock(thread) if shared.detect_races else None,
    }


@gpu_callbacks.fail_on_exception
def _copy_gmem_to_smem(*, token, mesh_location, thread, barrier_allocation_key_as_array, source_info=None, **operands):
    barrier = gpu_callbacks.HostAllocationKey.from_array(barrier_allocation_key_as_array)
    task = _Load(barrier_allocation_key=barrier, **_copy(mesh_location, thread, source_info, operands))
    task.is_run_of_bytes = not _is_swizzled(operands["dst_transforms"])
    gpu_callbacks._get_shared_memory().execute_async_task(task)
    return token


@gpu_callbacks.fail_on_exception
def _copy_smem_to_gmem(
    *, token, mesh_location, thread, predicate, reduction_op, source_info=None, commit_group=True, **operands
):
    if predicate is not None and not bool(predicate):
        return token
    task = _Store(**_copy(mesh_location, thread, source_info, operands))
    task.is_run_of_bytes = not _is_swizzled(operands["src_transforms"])
    task.reduction_op = reduction_op
    gpu_callbacks._get_shared_memory().execute_async_task(task)
    return token


@gpu_callbacks.fail_on_exception
def _atomic_store(*, token, mesh_location, thread, value, atomic_type, **operands):
    key, access = _key_and_access(operands, "ref")
    _reduce(key, access, value, atomic_type, thread, memory.GPULoggingInfo(mesh_location, thread, None))
    return token


# Unions.


def _resolve_ref(aval, key, transforms):
    """As in JAX, where every member of a union is a buffer of its own, but equal members are the first of them."""
    if not isinstance(aval, gpu_core.AbstractRefUnion):
        return key, transforms
    member, *rest = transforms
    members = jaxpr_interpret.union_members(aval)
    (own,) = (_placement(other.transforms) for other in members if other.transforms[0] == member)
    slot = next(slot for slot, other in enumerate(members) if _placement(other.transforms) == own)
    return key[slot], tuple(rest)


def _placement(transforms):
    """Which element of which type lies at which byte: of two members with the same, one is the other."""
    member, *layouts = transforms
    elements = np.arange(math.prod(member.shape), dtype=np.int32).reshape(member.shape)
    swizzle = None
    for layout in layouts:
        match layout:
            case gpu_core.UnswizzleRef():
                swizzle = layout.swizzle
            case gpu_core.UntilingTransform():
                elements = _untiled(elements, layout.tiling)
            case _:
                return member
    return member.dtype, member.offset, swizzle, elements.shape, elements.tobytes()


def _untiled(elements, tiling):
    """From (..., M / m, N / n, m, n) to (..., M, N)."""
    rank = len(tiling)
    leading = elements.ndim - 2 * rank
    order = [axis for i in range(rank) for axis in (leading + i, leading + rank + i)]
    sizes = [elements.shape[leading + i] * tiling[i] for i in range(rank)]
    return elements.transpose(*range(leading), *order).reshape(*elements.shape[:leading], *sizes)


# Equations.

_STOCK = jaxpr_interpret.JaxprInterpreter


class _Interpreter(_STOCK):
    """Splits a jaxpr at the equations that JAX cannot interpret, and leaves the runs between them to it."""

    def interpret(self, jaxpr, token, *args):
        handlers = [self._handler(equation) for equation in jaxpr.eqns]
        if not any(handlers):
            return super().interpret(jaxpr, token, *args)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        read_later = _read_later(jaxpr)
        run = []
        for index, (equation, handler) in enumerate(zip(jaxpr.eqns, handlers, strict=True)):
            if handler is None:
                run.append(equation)
                continue
            token = self._interpret_run(jaxpr, run, read_later[index], token, values)
            run = []
            inputs = [values[var] if _is_variable(var) else var.val for var in equation.invars]
            token, results = handler(equation, token, inputs)
            values.update(zip(equation.outvars, results, strict=True))
        token = self._interpret_run(jaxpr, run, read_later[-1], token, values)
        return token, [values[var] if _is_variable(var) else var.val for var in jaxpr.outvars]

    def _interpret_run(self, jaxpr, run, read_later, token, values):
        if not run:
            return token
        defined = dict.fromkeys(
            var for equation in run for var in equation.outvars if not isinstance(var, jax_core.DropVar)
        )
        used = dict.fromkeys(var for equation in run for var in equation.invars if _is_variable(var))
        inputs = [var for var in used if var not in defined]
        outputs = [var for var in defined if var in read_later]
        part = jaxpr.replace(
            constvars=[],
            consts=[],
            invars=inputs,
            outvars=outputs,
            eqns=list(run),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        token, results = super().interpret(part, token, *(values[var] for var in inputs))
        values.update(zip(outputs, results, strict=True))
        return token

    def _handler(self, equation):
        match equation.primitive:
            case discharge.run_state_p:
                return self._run_state
            case primitives.run_scoped_p if not equation.params["jaxpr"].invars:
                return self._run_scoped_without_scratch
            case gpu_primitives.wgmma_accumulator_store_p:
                return self._accumulator_store
            case gpu_primitives.wgmma_wait_p:
                return self._wgmma_wait
            case gpu_primitives.atomic_store_p:
                return self._atomic_store
            case gpu_primitives.wgmma_ref_p if not isinstance(equation.invars[1].aval, state_types.AbstractRef):
                return self._wgmma_from_registers
        return None

    def _run_state(self, equation, token, inputs):
        if not all(equation.params["is_initialized"]):
            raise NotImplementedError("uninitialized refs of run_state")
        jaxpr, keys, owned = equation.params["jaxpr"], [], []
        for value, var in zip(inputs, equation.invars, strict=True):
            owned.append(not isinstance(var.aval, state_types.AbstractRef))
            if owned[-1]:
                token, value = self._allocate_registers(equation, token, value, var.aval)
            keys.append(value)
        token, _ = self.interpret(jaxpr, token, *jaxpr.consts, *keys)
        # Pallas waits for all wgmmas before it returns the accumulators of run_state.
        token, _ = self._wait(token, 0)
        results = []
        for key, own, var in zip(keys, owned, equation.invars, strict=True):
            value = key
            if own:
                token, value = gpu_callbacks.call_get(
                    token=token,
                    result_shape_and_dtype=var.aval,
                    mesh_location=self.mesh_location,
                    thread=self.thread,
                    allocation_key_as_array=key,
                    transforms=(),
                    source_info=equation.source_info,
                )
                token = self._free_registers(equation, token, key)
            results.append(value)
        return token, results

    def _run_scoped_without_scratch(self, equation, token, inputs):
        """The interpreter of JAX takes nothing for an allocation that all threads share."""
        return self.interpret(equation.params["jaxpr"], token, *inputs)

    def _accumulator_store(self, equation, token, inputs):
        key, value = inputs
        token, old = gpu_callbacks.call_swap(
            token=token,
            result_shape_and_dtype=equation.invars[1].aval,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            transforms=(),
            val=value,
            mask=None,
            source_info=equation.source_info,
        )
        return token, [old]

    def _wgmma_wait(self, equation, token, inputs):
        return self._wait(token, equation.params["n"])

    def _wait(self, token, n):
        token = callback.io_callback(
            functools.partial(_wait_wgmma, n=n), gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, thread=self.thread
        )
        return token, []

    def _atomic_store(self, equation, token, inputs):
        ref, transforms, value = jax.tree.unflatten(equation.params["args_tree"], inputs)
        ref, transforms = jaxpr_interpret.resolve_ref(equation.invars[0].aval, ref, transforms)
        token = callback.io_callback(
            functools.partial(_atomic_store, atomic_type=equation.params["atomic_type"].value),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            ref_allocation_key_as_array=ref,
            ref_transforms=transforms,
            value=value,
        )
        return token, []

    def _wgmma_from_registers(self, equation, token, inputs):
        """The interpreter of JAX wants a buffer: it gets one that only this thread knows."""
        accumulator, left, *rest = inputs
        token, key = self._allocate_registers(equation, token, left, equation.invars[1].aval)
        token, _ = self._interpret_wgmma_ref_p(equation, token, lambda: [accumulator, key, *rest])
        return self._free_registers(equation, token, key), []

    def _allocate_registers(self, equation, token, value, aval):
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token, compute_unit=self.thread, memory_space_id=jnp.int32(_REGS), initial_ref_count=1
        )
        return gpu_callbacks.call_allocate_buffer(
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_request_as_array=request,
            value=jnp.asarray(value, aval.dtype).reshape(aval.shape),
            source_info=equation.source_info,
        )

    def _free_registers(self, equation, token, key):
        return gpu_callbacks.call_deallocate_buffer(
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            source_info=equation.source_info,
        )


def _is_variable(var) -> bool:
    return not isinstance(var, jax_core.Literal)


def _read_later(jaxpr) -> list[set[Any]]:
    """For each equation, and for the end, the variables that are read there or after it."""
    after = [set(filter(_is_variable, jaxpr.outvars))]
    for equation in reversed(jaxpr.eqns):
        after.append(after[-1] | set(filter(_is_variable, equation.invars)))
    return after[::-1]

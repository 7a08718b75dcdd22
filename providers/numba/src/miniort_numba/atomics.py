"""What compiled code needs to share work between threads: atomic words, and calls by address.

Addresses are plain integers, as ``array.ctypes.data`` gives them. Words are of 64 bits and aligned to them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_WORD_BYTES = 8


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """The word at an address; what other threads wrote before they stored it is seen after this."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "acquire", _WORD_BYTES)

    return types.int64(types.intp), generate


@intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the word at an address; whoever loads it sees all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), "release", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def add_to_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address, in one step that all threads see in the same order; gives what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], _WORD.as_pointer()), arguments[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def replace_word(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Put `new` in the place of `old`, unless another thread was faster and it's no longer there; says whether it did."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "acquire"), 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


@intrinsic
def call_part(typingctx: Any, function: Any, arguments: Any, begin: Any, end: Any) -> Any:
    """Call the compiled function at an address, ``function(arguments, begin, end)``."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD, _WORD])
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def call_finish(typingctx: Any, function: Any, arguments: Any, begin: Any, end: Any, start: Any, width: Any) -> Any:
    """Call the compiled function at an address, ``function(arguments, begin, end, start, width)``."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@intrinsic
def call_read_or_write(typingctx: Any, function: Any, descriptor: Any, buffer: Any, count: Any) -> Any:
    """Call the C library's ``read`` or ``write``, whose address is given."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(_WORD, [ir.IntType(32), _WORD, _WORD])
        descriptor = builder.trunc(given[1], ir.IntType(32))
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), [descriptor, given[2], given[3]])

    return types.int64(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def call_for_number(typingctx: Any, function: Any) -> Any:
    """Call the function of the C library at an address that takes nothing and gives an int, such as ``sched_getcpu``."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(given[0], kind.as_pointer()), []), _WORD)

    return types.int64(types.intp), generate


@intrinsic
def call_for_thread(typingctx: Any, function: Any, thread: Any, size: Any, memory: Any) -> Any:
    """Call the function of the C library at an address that takes a thread's number, a size and an address, ``sched_setaffinity``."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _WORD, _WORD])
        thread = builder.trunc(given[1], ir.IntType(32))
        return builder.sext(builder.call(builder.inttoptr(given[0], kind.as_pointer()), [thread, *given[2:]]), _WORD)

    return types.int64(types.intp, types.intp, types.intp, types.intp), generate


def _pointer_to(kind: Any) -> Any:
    """The function that gives an address as a pointer to elements of a type, for ``carray``."""

    @intrinsic
    def pointer_at(typingctx: Any, address: Any) -> Any:
        """The address as a pointer."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    return pointer_at


floats_at, words_at, integers_at = _pointer_to(types.float32), _pointer_to(types.int64), _pointer_to(types.int32)
bytes_at, signed_bytes_at = _pointer_to(types.uint8), _pointer_to(types.int8)


@intrinsic
def relax(typingctx: Any) -> Any:
    """Tell the processor that this thread waits in a loop; nothing where there's no instruction for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate

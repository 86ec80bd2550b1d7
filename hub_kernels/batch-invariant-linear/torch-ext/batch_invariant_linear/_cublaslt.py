"""cuBLASLt without split-K, a second engine behind the plain-K contract: y = x @ weight.T (+ bias) in 16 bits.

It is reached through a handle of our own, so no setting of the process changes and other models' products stay as they
are. No reduction between programs is allowed and no workspace that could hold partial sums, which leaves kernels that
sum K in one ascending pass, as ours do; `selfcheck.py` admits each of their configurations after it has seen equal
bits. The calls go through ctypes to the library that torch has loaded; names below are those of NVIDIA's cublasLt.h.
"""

import ctypes
import functools
import threading
import weakref

import torch

_COMPUTE_32F = 68
_R_32F = 0
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8
_OP_T, _EPILOGUE_BIAS = 1, 4
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK, _PREF_MIN_ALIGNMENT = 1, 3, (5, 6, 7, 8)
_CONFIG_SPLITK_NUM, _CONFIG_REDUCTION_SCHEME = 2, 3
# Enough for the tile counter of a persistent kernel, too little for partial sums.
_WORKSPACE_BYTES = 256
# The heuristic has kernels of its own for one row that split K; with no split allowed it falls back to a slow one. The
# kernels that it picks for a few rows serve one row as well.
_FEWEST_ROWS = 8


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Refused(RuntimeError):
    """The library does not serve what it was asked for, or a call of it failed."""


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """The cuBLASLt that torch has loaded, or None without CUDA. PyDLL: a call is too short to drop the GIL."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.PyDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:  # torch was linked statically or the platform names it otherwise: Triton serves every case
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    pointer = ctypes.c_void_p
    library.cublasLtMatmul.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
    return library


def version() -> int | None:
    """The library's version, None if there is no library."""
    return None if _library() is None else int(_library().cublasLtGetVersion())


def _call(name: str, *arguments) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise Refused(f"{name} gave status {status}")


def _set(kind: str, handle: ctypes.c_void_p, attribute: int, value) -> None:
    name = f"cublasLt{kind}SetAttribute"
    _call(name, handle, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Product:
    """One configured product: fixed (rows, n, k), dtype, row strides and bias, ready to launch.

    `algorithm` overrides the library's choice. `configuration`: the algorithm as hexadecimal digits; equal ones are
    one kernel. `admitted`: whether its bits are ours, None until `selfcheck.admits` has said so.
    """

    admitted: bool | None = None

    def __init__(
        self,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        stride_x: int,
        stride_w: int,
        bias: bool,
        algorithm: "_Algorithm | None" = None,
    ):
        self._handle = _handle()
        self._owned: list[tuple[str, ctypes.c_void_p]] = []
        give_back = weakref.finalize(self, _destroy, self._owned)
        give_back.atexit = False
        try:
            self._configure(rows, n, k, dtype, stride_x, stride_w, bias, algorithm)
        except Refused:
            give_back()
            raise

    def _configure(self, rows, n, k, dtype, stride_x, stride_w, bias, algorithm) -> None:
        self._operation = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_32F, _R_32F)
        self._owned.append(("cublasLtMatmulDescDestroy", self._operation))
        _set("MatmulDesc", self._operation, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        if bias:
            _set("MatmulDesc", self._operation, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        # The library counts in columns: (weight as K x N).T times (x as K x M) is y as N x M.
        self._a = self._layout(dtype, k, n, stride_w)
        self._b, self._d = self._layout(dtype, k, rows, stride_x), self._layout(dtype, n, rows, n)
        self.algorithm = algorithm or self._choose(rows, n, k, dtype, stride_x)
        self._workspace = self._needs(self.algorithm)
        if self._workspace is None:
            raise Refused("the algorithm does not serve this product")
        self.configuration = bytes(self.algorithm).hex()
        self._bias_pointer = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._one_at, self._zero_at = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self._algorithm_at = ctypes.addressof(self.algorithm)
        self._matmul = _library().cublasLtMatmul

    def _layout(self, dtype, rows, columns, stride) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], *sizes)
        self._owned.append(("cublasLtMatrixLayoutDestroy", layout))
        return layout

    def _choose(self, rows, n, k, dtype, stride_x) -> _Algorithm:
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        b, d = self._b, self._d
        if rows < _FEWEST_ROWS:
            b, d = self._layout(dtype, k, _FEWEST_ROWS, stride_x), self._layout(dtype, n, _FEWEST_ROWS, n)
        try:
            _set("MatmulPreference", preference, _PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE_BYTES))
            _set("MatmulPreference", preference, _PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(0))
            for attribute in _PREF_MIN_ALIGNMENT:
                _set("MatmulPreference", preference, attribute, ctypes.c_uint32(16))
            results, found = (_Heuristic * 4)(), ctypes.c_int(0)
            layouts = (self._operation, self._a, b, d, d)
            _call("cublasLtMatmulAlgoGetHeuristic", _handle(), *layouts, preference, 4, results, ctypes.byref(found))
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        for result in results[: found.value]:
            algorithm = _Algorithm.from_buffer_copy(result.algorithm)
            unsplit = _configuration(algorithm, _CONFIG_SPLITK_NUM) <= 1
            unreduced = _configuration(algorithm, _CONFIG_REDUCTION_SCHEME) == 0
            if result.state == 0 and unsplit and unreduced and self._needs(algorithm) is not None:
                return algorithm
        raise Refused("the library offers no algorithm without split-K")

    def _needs(self, algorithm: _Algorithm) -> int | None:
        """Bytes of workspace, None if the algorithm does not serve this product with the little that we allow."""
        layouts, checked = (self._operation, self._a, self._b, self._d, self._d), _Heuristic()
        status = _library().cublasLtMatmulAlgoCheck(
            self._handle, *layouts, ctypes.byref(algorithm), ctypes.byref(checked)
        )
        return checked.workspace if status == 0 and checked.workspace <= _WORKSPACE_BYTES else None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Launch on the current stream. Not for two threads at once, since the bias is state of the object."""
        if bias is not None:
            self._bias_pointer.value = bias.data_ptr()
            _set("MatmulDesc", self._operation, _DESC_BIAS_POINTER, self._bias_pointer)
        out = y.data_ptr()
        workspace = None
        if self._workspace:  # from torch's allocator, which knows about streams and graphs
            workspace = torch.empty(self._workspace, dtype=torch.uint8, device=y.device)
        status = self._matmul(
            self._handle,
            self._operation,
            self._one_at,
            weight.data_ptr(),
            self._a,
            x.data_ptr(),
            self._b,
            self._zero_at,
            out,
            self._d,
            out,
            self._d,
            self._algorithm_at,
            None if workspace is None else workspace.data_ptr(),
            self._workspace,
            torch._C._cuda_getCurrentRawStream(y.device.index),  # as torch's own generated code asks for it
        )
        if status != 0:
            raise Refused(f"cublasLtMatmul gave status {status}")


def _destroy(owned: list[tuple[str, ctypes.c_void_p]]) -> None:
    """Give the library's descriptions back."""
    for name, description in owned:
        _call(name, description)


def _configuration(algorithm: _Algorithm, attribute: int) -> int:
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    size = ctypes.c_size_t(4)
    get = _library().cublasLtMatmulAlgoConfigGetAttribute
    status = get(ctypes.byref(algorithm), attribute, ctypes.byref(value), size, ctypes.byref(written))
    if status != 0:
        raise Refused(f"cublasLtMatmulAlgoConfigGetAttribute gave status {status}")
    return value.value


class _Thread(threading.local):
    """Each thread has products of its own: a product's bias pointer is state."""

    def __init__(self):
        self.products: dict[tuple, Product | None] = {}


_thread = _Thread()
_MOST_PRODUCTS = 1024
# By device, for all threads: a product sets nothing in it, and `_library` keeps the GIL while it works.
_handles: dict[int, ctypes.c_void_p] = {}
_lock = threading.Lock()


def _handle() -> ctypes.c_void_p:
    device = torch.cuda.current_device()
    with _lock:
        if device not in _handles:
            handle = ctypes.c_void_p()
            _call("cublasLtCreate", ctypes.byref(handle))
            _handles[device] = handle
        return _handles[device]


def _aligned(tensor: torch.Tensor) -> bool:
    """Rows of 16-byte aligned elements, one after the other or with a gap between them."""
    return tensor.stride(-1) == 1 and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """The configured product of x (M, K) and weight (N, K), or None where the library cannot serve it.

    Nothing runs on the GPU here.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if x.dtype not in _TYPES or n % 8 or k % 8 or not (_aligned(x) and _aligned(weight)):
        return None
    if bias is not None and (bias.data_ptr() % 16 or bias.stride(0) != 1):
        return None
    stride_x = x.stride(0) if rows > 1 else k
    key = (x.device.index, rows, n, k, x.dtype, stride_x, weight.stride(0), bias is not None)
    known = _thread.products
    if key not in known:
        if len(known) >= _MOST_PRODUCTS:
            known.clear()
        try:
            known[key] = Product(*key[1:]) if _library() is not None and min(stride_x, weight.stride(0)) >= k else None
        except Refused:  # the library's way to say "not supported": Triton serves every case
            known[key] = None
    return known[key]

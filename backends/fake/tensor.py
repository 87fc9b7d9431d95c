"""Tensors of the fake device: torch sees their shape, nobody sees their memory.

Every call on one goes through `__torch_function__`: questions about its geometry are answered, views share its memory,
and everything else raises and names the call. Only the runtime and op implementations get at the bytes, through `ref`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.fake.errors import HostAccessError
from deepinfer.backends.fake.memory import Allocation, Ref

DEVICE: Final = torch.device("privateuseone", 0)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUESTIONS: Final = _words(
    """
    shape dtype device ndim layout itemsize nbytes is_meta is_cuda is_cpu is_sparse is_quantized is_leaf requires_grad
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_pinned get_device __len__ __hash__ __class__
    """
)
_VIEWS: Final = _words(
    """
    __getitem__ select narrow split split_with_sizes tensor_split chunk unbind __iter__ view view_as reshape reshape_as
    flatten unflatten ravel unsqueeze squeeze transpose swapaxes swapdims permute movedim moveaxis t T mT adjoint
    expand expand_as broadcast_to as_strided unfold diagonal alias detach
    """
)


class FakeTensor(Tensor):
    """A tensor in the memory of a `FakeRuntime`.

    Attributes:
        allocation: the memory, shared by all views.
        shadow: a tensor without memory and with the same geometry; views are taken of it.
    """

    allocation: Allocation
    shadow: Tensor
    _ref: Ref | None

    @staticmethod
    def __new__(cls: type[FakeTensor], allocation: Allocation, shadow: Tensor) -> FakeTensor:
        """Wrap memory in the geometry of `shadow`."""
        made: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=DEVICE,
        )
        made.allocation = allocation
        made.shadow = shadow
        made._ref = None
        return made

    def __init__(self, allocation: Allocation, shadow: Tensor) -> None:
        pass

    def ref(self) -> Ref:
        """What queued work holds; for the runtime and op implementations."""
        if self._ref is None:
            shadow = self.shadow
            self._ref = self.allocation.ref(shadow.dtype, shadow.shape, shadow.stride(), int(shadow.storage_offset()))
        return self._ref

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Sizes; asked so often that it goes around `__torch_function__`."""
        return self.shadow.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type; as `shape`."""
        return self.shadow.dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shadow = self.shadow
        return f"FakeTensor(shape={tuple(shadow.shape)}, dtype={shadow.dtype}, at={self.allocation.block.address:#x})"

    def __str__(self) -> str:
        raise HostAccessError("str() or print()")

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensor:
        raise HostAccessError("copy.deepcopy()")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions, take views, refuse the rest."""
        kwargs = kwargs or {}
        name = _name(func)
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _VIEWS and args and isinstance(args[0], FakeTensor):
            return _view(name, func, args[0], args[1:], kwargs)
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not isinstance(a, FakeTensor)]
        if others:
            raise HostAccessError(_call(name), "it is mixed with a tensor of the host")
        raise HostAccessError(_call(name), "" if name.startswith("_") else "this is neither a view nor an op")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What slips past `__torch_function__`, such as a call from C++."""
        raise HostAccessError(str(func))


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _call(name: str) -> str:
    return f"Tensor.{name}" if name.startswith("_") else f"torch's {name}()"


def _view(
    name: str, func: Callable[..., Any], base: FakeTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if name == "__getitem__" and not all(map(_plain_index, args[0] if isinstance(args[0], tuple) else args)):
        raise HostAccessError(_call(name), "an index by lists or tensors is a computation (`gather_rows`), not a view")
    shadows = [a.shadow if isinstance(a, FakeTensor) else a for a in args]
    made = func(base.shadow, *shadows, **kwargs)
    if isinstance(made, Tensor):
        return _wrap(name, base, made)
    return type(made)(_wrap(name, base, part) for part in made)


def _plain_index(index: object) -> bool:
    if isinstance(index, bool | Tensor):
        return False
    return index is None or index is Ellipsis or isinstance(index, slice | Integral)


def _wrap(name: str, base: FakeTensor, shadow: Tensor) -> FakeTensor:
    if not torch._C._is_alias_of(base.shadow, shadow):  # type: ignore[attr-defined]
        raise HostAccessError(_call(name), f"it would copy, since strides {base.shadow.stride()} allow no such view")
    return FakeTensor(base.allocation, shadow)

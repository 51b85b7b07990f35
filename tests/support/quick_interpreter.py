"""Triton's interpreter without its repetitions: it prepares its language anew at each call of a function in a kernel,
and makes each type and each shape anew for each value. No operation is changed.
"""

import math
from collections.abc import Callable
from typing import Any


def make_quick() -> None:
    """Let the interpreter prepare its language once a launch, and look up NumPy's types instead of listing them all."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_splitserve_quick"):
        interpreter._splitserve_quick = True
        interpreter._patch_lang = OncePerLaunch(interpreter)
        interpreter._get_np_dtype = remembering(interpreter._get_np_dtype)
        remember_blocks(interpreter.tl.core)


class OncePerLaunch:
    """Stands for the interpreter's function that replaces the language's functions by interpreted ones.

    They are restored after a launch. A call within a launch finds them replaced, unless its module knows the language
    by another name.
    """

    def __init__(self, interpreter: Any) -> None:
        self._patch, self._empty = interpreter._patch_lang, interpreter._LangPatchScope
        self._languages = (interpreter.tl, interpreter.tl.core)
        self._replaced: set[int] = set()  # indices of languages

    def __call__(self, function: Callable[..., Any]) -> Any:
        known = function.__globals__.values()
        wanted = {number for number, language in enumerate(self._languages) if any(it is language for it in known)}
        if wanted and wanted <= self._replaced:
            return self._empty()
        scope = self._patch(function)
        restore = scope.restore

        def restored() -> None:
            self._replaced.clear()
            restore()

        scope.restore = restored
        self._replaced |= wanted
        return scope


def remembering(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``look_up`` with a memory, for scalar types by name."""
    found: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    return remembered


def remember_blocks(core: Any) -> None:
    """Let types of blocks with equal elements and shapes share their fields, and tensors of equal shapes theirs."""
    make_type = core.block_type.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {(): (core.constexpr(1), core.tuple([]))}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor

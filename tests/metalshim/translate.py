"""Turn the arguments of mx.fast.metal_kernel into one C++ text: MLX's signature rules, and Metal's threadgroup storage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MSL_TYPES = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat16_t", "int8": "int8_t",
    "uint8": "uint8_t", "int16": "int16_t", "uint16": "uint16_t", "int32": "int32_t",
    "uint32": "uint32_t", "int64": "int64_t", "uint64": "uint64_t", "bool": "bool",
}  # fmt: skip

# Metal's attributes that a body may name: type, and the expression over MslThread.
_ATTRIBUTES = {
    "dispatch_simdgroups_per_threadgroup": ("uint", "a->full_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "MSL_UINT3(a->full_group_size)"),
    "simdgroup_index_in_threadgroup": ("uint", "a->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "a->simdgroups"),
    "thread_index_in_simdgroup": ("uint", "a->lane"),
    "thread_index_in_threadgroup": ("uint", "a->index_in_group"),
    "thread_position_in_grid": ("uint3", "MSL_UINT3(a->in_grid)"),
    "thread_position_in_threadgroup": ("uint3", "MSL_UINT3(a->in_group)"),
    "threadgroup_position_in_grid": ("uint3", "MSL_UINT3(a->group)"),
    "threadgroups_per_grid": ("uint3", "MSL_UINT3(a->groups)"),
    "threads_per_grid": ("uint3", "MSL_UINT3(a->grid)"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "MSL_UINT3(a->group_size)"),
}

CONSTANT_BELOW = 8  # elements: MLX puts smaller inputs into the constant address space

TemplateValue = bool | int | str


@dataclass(frozen=True)
class Argument:
    """An input or output: *dtype* is its name in MLX; *given* are the of shape, strides and ndim that the body names."""

    name: str
    dtype: str
    size: int
    ndim: int
    output: bool = False
    given: tuple[str, ...] = ()


def named(argument: str, body: str) -> tuple[str, ...]:
    """Return which of shape, strides and ndim of *argument* MLX passes: those whose name occurs in *body*."""
    return tuple(what for what in ("shape", "strides", "ndim") if f"{argument}_{what}" in body)


def translation(
    name: str,
    header: str,
    body: str,
    arguments: Sequence[Argument],
    template: Sequence[tuple[str, TemplateValue]],
) -> str:
    """Return the C++ text whose `msl_entry` runs one thread; buffers come in the order of *arguments* and what they give."""
    parameters, values = [], []

    def add(declaration: str, pointer: str, reference: bool = False) -> None:
        parameters.append(declaration)
        values.append(f"{'*' if reference else ''}({pointer}*)b[{len(values)}]")

    for argument in arguments:
        kind = MSL_TYPES[argument.dtype]
        if argument.output:
            add(f"device {kind}* {argument.name}", kind)
            continue
        space = "constant" if argument.size < CONSTANT_BELOW else "device"
        scalar = argument.ndim == 0
        add(
            f"const {space} {kind}{'&' if scalar else '*'} {argument.name}", f"const {kind}", scalar
        )
        if "shape" in argument.given:
            add(f"const constant int* {argument.name}_shape", "const int")
        if "strides" in argument.given:
            add(f"const constant int64_t* {argument.name}_strides", "const int64_t")
        if "ndim" in argument.given:
            add(f"const constant int& {argument.name}_ndim", "const int", reference=True)
    for attribute, (kind, expression) in _ATTRIBUTES.items():
        if attribute in body:
            parameters.append(f"{kind} {attribute}")
            values.append(expression)

    declared = ", ".join(f"{_kind(value)} {key}" for key, value in template)
    given = ", ".join(_literal(value) for _, value in template)
    instance = f"custom_kernel_{name}" + (f"<{given}>" if template else "")
    types = ", ".join(re.sub(r"\s*\w+$", "", parameter) for parameter in parameters)
    return "\n".join([
        f'#line 1 "{name}.header"', shared_storage(header),
        f'#line 100000 "{name}.signature"',
        f"template <{declared}>" if template else "",
        f"void custom_kernel_{name}(", ",\n".join(parameters), ") {",
        f'#line 1 "{name}.metal"', shared_storage(body), "}",
        f"template void {instance}({types});" if template else "",
        f'#line 200000 "{name}.entry"',
        f'extern "C" void msl_entry(void** b, const MslThread* a) {{ {instance}({", ".join(values)}); }}',
        _GROUP_MEMORY,
    ])  # fmt: skip


_GROUP_MEMORY = """
extern "C" {
extern char __start_msl_group[] __attribute__((weak));
extern char __stop_msl_group[] __attribute__((weak));
void* msl_group_memory() { return __start_msl_group; }
size_t msl_group_memory_bytes() { return __stop_msl_group - __start_msl_group; }
}
"""

_DECLARATION = re.compile(r"(^|[;{}\n])([ \t]*)threadgroup\s+([^;{}()]*?);", re.DOTALL)
_ARRAY = re.compile(r"(.*\S)\s+(\w+)\s*((?:\[[^\]]*\]\s*)+)", re.DOTALL)


def shared_storage(source: str) -> str:
    """Mark declarations of threadgroup storage in *source*; `threadgroup T* p` is a pointer and stays as it is.

    The marked ones become statics of one linker section, which is one threadgroup's memory: they run one at a time.
    A checked run puts a zone behind each array that no thread may touch.
    """

    def marked(match: re.Match[str]) -> str:
        declared = re.split(r"[\[=]", match.group(3), maxsplit=1)[0]
        if "*" in declared or "&" in declared:
            return match.group(0)
        array = _ARRAY.fullmatch(match.group(3))
        kept = (
            f"MSL_ARRAY({array[2]}, {array[3]}, {array[1]})"
            if array
            else f"MSL_SHARED {match.group(3)}"
        )
        return f"{match.group(1)}{match.group(2)}{kept};"

    before = None
    while before != source:  # neighbouring declarations share a semicolon
        before, source = source, _DECLARATION.sub(marked, source)
    return source


def _kind(value: TemplateValue) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _literal(value: TemplateValue) -> str:
    return str(value).lower() if isinstance(value, bool | int) else MSL_TYPES[value]

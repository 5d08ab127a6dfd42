"""Turn the arguments of mx.fast.cuda_kernel into one C++ text: MLX's signature rules, shared memory, inline PTX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cudashim import ptx
from tests.metalshim.translate import Argument, TemplateValue

CUDA_TYPES = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int8": "signed char",
    "uint8": "unsigned char", "int32": "int", "uint32": "unsigned int",
}  # fmt: skip

_INCLUDE = re.compile(r'#include "([^"]+)"\n')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
_STATIC = re.compile(r"__shared__\s+([\w: ]+?)\s+(\w+)\s*((?:\[[^\]]+\])+);")
_UNROLL = re.compile(r"#pragma unroll[^\n]*")
_IN_PLACE = re.compile(r"const_cast<[^>]+>\((\w+)\)")


def written_inputs(body: str) -> frozenset[str]:
    """Return the inputs that *body* writes to: those whose const it casts away."""
    return frozenset(_IN_PLACE.findall(body))


def translation(
    name: str,
    header: str,
    body: str,
    arguments: Sequence[Argument],
    template: Sequence[tuple[str, TemplateValue]],
    shared_bytes: int,
    read: Callable[[Path], str] = Path.read_text,
) -> str:
    """Return the C++ text whose `msl_entry` runs one thread; buffers come in the order of *arguments* and what they give.

    Files that the header includes, as *read* gives them, become part of the text: their inline PTX has to be translated too.
    """

    def included(match: re.Match[str]) -> str:
        path = Path(match[1])
        return f'#line 1 "{path.name}"\n{_translated(read(path), 0)}\n'

    parameters, values = [], []

    def add(declaration: str, kind: str, *, by_value: bool = False) -> None:
        parameters.append(declaration)
        values.append(f"{'*' if by_value else ''}({kind}*)b[{len(values)}]")

    for argument in arguments:
        kind = CUDA_TYPES[argument.dtype]
        const = "" if argument.output else "const "
        add(f"{const}{kind}* {argument.name}", f"{const}{kind}")
        if "shape" in argument.given:
            add(f"const int* {argument.name}_shape", "const int")
        if "strides" in argument.given:
            add(f"const int64_t* {argument.name}_strides", "const int64_t")
        if "ndim" in argument.given:
            add(f"const int {argument.name}_ndim", "const int", by_value=True)

    constants = "".join(_constant(key, value) for key, value in template)
    return "\n".join([
        '#include "cuda_shim.h"',
        _INCLUDE.sub(included, header).replace("#undef __global__", "// bounds").replace("#define __global__", "//"),
        f'#line 100000 "{name}.signature"',
        f"static void {name}({', '.join(parameters)}) {{",
        constants + f'#line 1 "{name}.cu"', _translated(body, shared_bytes), "}",
        f'#line 200000 "{name}.entry"',
        '#define EXPORTED extern "C" __attribute__((visibility("default")))',
        f"EXPORTED void msl_entry(void** b, const MslThread*) {{ {name}({', '.join(values)}); ptx::returned(); }}",
        "EXPORTED void* msl_group_memory() { return __start_msl_group; }",
        "EXPORTED size_t msl_group_memory_bytes() { return __stop_msl_group - __start_msl_group; }",
        "",
    ])  # fmt: skip


def _translated(source: str, shared_bytes: int) -> str:
    source = _UNROLL.sub("", ptx.translated(source))
    source = _DYNAMIC.sub(rf"CUDA_ARRAY(\2, [{shared_bytes} / sizeof(\1)], \1);", source)
    return _STATIC.sub(r"CUDA_ARRAY(\2, \3, \1);", source)


def _constant(key: str, value: TemplateValue) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {key} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"constexpr int {key} = {value};\n"
    return f"using {key} = {CUDA_TYPES[value]};\n"

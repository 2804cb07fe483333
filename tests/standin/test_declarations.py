"""The declarations that replace absent CUDA headers agree with CUDA's headers."""

import re
from pathlib import Path

from tests.standin import build


def test_enumerators_have_cudas_values_and_our_c_compiles_with_cudas_headers_without_a_warning(tmp_path: Path) -> None:
    headers = sorted(build.DECLARATIONS.glob("*.h"))
    values = [found for header in headers for found in re.findall(r"\b(\w+) = (\d+)", header.read_text())]
    includes = [f"#include <{header.name}>\n" for header in headers]
    source = tmp_path / "claims.c"
    source.write_text("".join([*includes, *(f'_Static_assert({name} == {n}, "{name}");\n' for name, n in values)]))
    build.compile_sources(tmp_path / build.NAME, build.cuda_headers(), *build.STRICT, str(source))
    assert len(values) > 50

"""Stands for bisheng and its linker: every call is noted in `calls.txt` beside it, and the output is an ELF file."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

tool, arguments = Path(sys.argv[0]), sys.argv[1:]
with open(tool.parent / "calls.txt", "a", encoding="utf-8") as notes:
    notes.write(" ".join((tool.name, *arguments)) + "\n")
if arguments == ["--version"]:
    print("bisheng 9.2.0, a fake")
    sys.exit()
output, source = Path(arguments[-1]), Path(arguments[-3])
if tool.name == "ld.lld":
    shutil.copy(source, output)
    sys.exit()
text = source.read_text(encoding="utf-8")
if "mistake" in text:
    sys.exit(f"{source}:1:1: error: unknown word 'mistake'")
sections = []
kernels = re.findall(r"__global__\s+__(vector|cube|mix)__(?:\([^)]*\))?\s+void\s+(\w+)", text)
for cores, name in dict.fromkeys(kernels):  # macros that make kernels are counted by the name of their parameter
    for suffix in ("_mix_aic", "_mix_aiv") if cores == "mix" else ("",):
        place = f"{name}{suffix}"
        sections.append(f'const int meta_{place} __attribute__((used, section(".ascend.meta.{place}"))) = 1;')
compiler = ["g++", "-x", "c++", "-c", "-", "-o", str(output)]
subprocess.run(compiler, input="\n".join(sections) + "\n", text=True, check=True)

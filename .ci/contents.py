"""Check the wheel and the source archive: all of it is there, and nothing else."""

import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {
    p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".pyi")
}
IN_ARCHIVE = {"benchmarks", "docs", "notebooks", "src", "tests"}
FILES = {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}

[wheel] = Path(sys.argv[1]).glob("*.whl")
[archive] = Path(sys.argv[1]).glob("*.tar.gz")

with zipfile.ZipFile(wheel) as opened:
    names = opened.namelist()
    about = message_from_string(opened.read(next(n for n in names if n.endswith("/METADATA"))).decode())
code = {name for name in names if ".dist-info/" not in name}
assert {name.split("/")[0] for name in code} == {"onward"}, code
assert code >= SOURCES, SOURCES - code
assert "](docs/" not in about.get_payload(), "a link of the README that leads nowhere"

with tarfile.open(archive) as opened:
    inside = [Path(*Path(m.name).parts[1:]) for m in opened.getmembers() if m.isfile()]
assert {p.parts[0] for p in inside} == IN_ARCHIVE | FILES, sorted({p.parts[0] for p in inside})
assert not [p for p in inside if {"_build", "_generated", "_executed", "__pycache__"} & set(p.parts)]
print(f"{wheel.name}: {len(code)} files; {archive.name}: {len(inside)} files")

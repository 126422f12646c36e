"""Run the Python of a README, block after block, with no more than the wheel installed."""

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
names: dict[str, object] = {}
ran, lacking = 0, []
for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
    try:
        with redirect_stdout(StringIO()):
            exec(compile(block, sys.argv[1], "exec"), names)
        ran += 1
    except ImportError as error:  # an extra, which the README names before
        lacking.append(str(error))
assert ran > 5, lacking
assert all("optax" in why or "pip install 'onward[" in why for why in lacking), lacking
print(f"{ran} blocks of the README ran, {len(lacking)} need an extra")

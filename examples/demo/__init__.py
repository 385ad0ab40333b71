"""The demo: one small language model, loaded with every method, measured, and reloaded while it runs.

`python -m examples.demo` (or `make demo`) runs it; `--short` does less of everything.
"""

import os

# torch's profiler would write into the progress bar: two lines at each start and stop, and a warning about blocks that
# are older than a measurement. Both switches are read when torch is imported, which comes after this file.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

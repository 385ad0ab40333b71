"""What `import olq` loads, and what it leaves alone. Each question is asked in a fresh interpreter.

Torch itself loads NumPy and tqdm where they are installed, so the measure is what olq loads on top of its
three dependencies. A program that does load something heavy is measured too: the check must be able to fail.
"""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

MEASURE = """
import sys
import torch, pydantic, safetensors.torch
pydantic.create_model("Model", size=(int, pydantic.Field(gt=0)))  # it loads its parts on first use
known = {{name.split(".")[0] for name in sys.modules}} | set(sys.stdlib_module_names)
{program}
packages = {{name.split(".")[0] for name in sys.modules}}
print(*sorted(name for name in packages - known - {{"olq"}} if not name.startswith("_sysconfigdata")))
"""


def run(program: str) -> str:
    """Standard output of a fresh interpreter; a program that raises fails the test with its traceback."""
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(program: str) -> list[str]:
    return run(MEASURE.format(program=program)).split()


def test_import_olq_loads_its_three_dependencies_and_nothing_else():
    assert loaded_by("import olq") == []


def test_the_measure_finds_a_heavy_import():
    assert "hypothesis" in loaded_by("import olq, hypothesis")


def test_import_olq_works_where_numpy_tqdm_and_triton_are_not_installed():
    missing = ["numpy", "tqdm", "triton", "hypothesis", "matplotlib", "tokenizers"]
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    quiet = "import warnings; warnings.simplefilter('ignore')  # torch warns that NumPy is not there"
    assert run(f"{hide}\n{quiet}\nimport olq\nprint(olq.__name__)") == "olq"


def test_importing_olq_leaves_the_process_as_it_was():
    program = """
import logging, threading, warnings
import torch, pydantic, safetensors

def state():
    logger = logging.getLogger()
    switches = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    return list(logger.handlers), logger.level, threading.active_count(), warnings.filters[:], switches

before = state()
import olq
print(state() == before)
"""
    assert run(program) == "True"


def modules() -> list[str]:
    """Names of olq's modules. Kernels need Triton, integrations their host: they are not imported here."""
    files = [path.relative_to(REPO).with_suffix("") for path in (REPO / "olq").rglob("*.py")]
    names = {".".join(f.parts).removesuffix(".__init__") for f in files if f.name != "__main__"}
    return sorted(name for name in names if not name.startswith(("olq.kernels", "olq.integrations")))


def test_each_module_can_be_the_first_one_imported():
    # A fork for each, not an interpreter: torch is loaded once. The package's own __init__ imports everything
    # in a good order, so an empty package stands in for it.
    program = f"""
import importlib, os, sys, traceback
import torch, pydantic, safetensors
failed = []
for name in {modules()}:
    child = os.fork()
    if not child:
        try:
            if name != "olq":
                sys.modules["olq"] = type(sys)("olq")
                sys.modules["olq"].__path__ = [{str(REPO / "olq")!r}]
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"can't be imported first: {{failed}}" if failed else 0)
"""
    run(program)

"""Where a worker process imports code from: the places its parent uses, and no others.

Real programs tune in real workers, in a directory full of modules that report when they are run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS

pytestmark = pytest.mark.timeout(90)

# What a worker imports before and after it knows its parent's path, and what Python imports by itself as it starts.
PLANTED = (
    *("pickle", "struct", "threading", "json", "typing", "sitecustomize", "usercustomize"),
    *("numpy", "jax", "jaxlib", "anyio", "asel/__init__", "asel/tuning/worker"),
    *("asel/tuning/worker_messages", "asel/tuning/outcomes"),
)

KERNELS = """
import json, os, sys
import asel

def state():
    return {"pid": os.getpid(), "path": sys.path, "flags": {name: getattr(sys.flags, name) for name in FLAGS},
            "asel": asel.__file__, "warnings": sys.warnoptions, "usercustomize": "usercustomize" in sys.modules,
            "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
            "safe_children": os.environ.get("PYTHONSAFEPATH"), "python_path": os.environ.get("PYTHONPATH"),
            "argv": sys.argv}

FLAGS = ["isolated", "ignore_environment", "safe_path", "utf8_mode", "optimize", "dont_write_bytecode", "dev_mode"]

def scaled(factor):  # importable, so it is called in the worker
    print("worker:", json.dumps(state()), file=sys.stderr, flush=True)
    print("read:", repr(sys.stdin.read()), repr(os.read(0, 1)), file=sys.stderr, flush=True)
    return lambda x: x * factor
"""

PROGRAM = """
import json, os, sys
sys.path.insert(0, {checkout!r})
import asel
del sys.path[0]
import anyio, jax, numpy as np
from asel import Tuner
{imports}

def run(make):
    print("parent:", json.dumps(kernels.state()), file=sys.stderr, flush=True)
    winner = anyio.run(Tuner(1, 1, isolation="process").autotune, make, (np.ones(8, np.float32),), {{}}, [3])
    print("winner:", winner, file=sys.stderr, flush=True)

{before}
run(kernels.scaled)
"""


@dataclass
class Ground:
    """An app with a program and kernels, and a working directory in which to plant modules."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.app, self.cwd, self.log = self.root / "app", self.root / "cwd", self.root / "planted-modules-that-ran"
        self.app.mkdir()
        self.cwd.mkdir()
        (self.app / "kernels.py").write_text(KERNELS)
        planter = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(TESTS)!r}]\n"
        planter += f"from test_worker_imports import plant; plant({str(self.cwd)!r}, {str(self.log)!r})\n"
        (self.root / "planter.py").write_text(planter)

    def plant(self) -> None:
        plant(self.cwd, self.log)

    @property
    def plant_later(self) -> str:
        """Code that plants modules after the program has imported its own."""
        return f"import subprocess\nsubprocess.run([sys.executable, {str(self.root / 'planter.py')!r}], check=True)\n"

    def run(self, *arguments: str | Path, cwd: Path | None = None, python: str = sys.executable) -> tuple[dict, dict]:
        """Return the facts that the program and its worker report about themselves."""
        told = self.output(*arguments, cwd=cwd, python=python)
        assert told["winner:"] == "3"
        assert told["read:"] == "'' b''"  # requests come through another pipe
        parent, worker = json.loads(told["parent:"]), json.loads(told["worker:"])
        assert parent["pid"] != worker["pid"]
        assert worker["asel"] == parent["asel"] == str(ROOT / "asel" / "__init__.py")
        assert worker["safe_children"] == "1"
        assert worker["argv"] == [str(ROOT / "asel" / "tuning" / "worker.py")]  # visible to every user
        return parent, worker

    def output(self, *arguments: str | Path, cwd: Path | None = None, python: str = sys.executable) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ended = subprocess.run(
            [python, *arguments],
            cwd=cwd or self.cwd,
            env={**environment, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        ran = self.log.read_text() if self.log.exists() else ""
        assert ran == "", "planted modules that were run"
        assert ended.returncode == 0, ended.stderr
        return dict(line.split(" ", 1) for line in ended.stderr.splitlines() if line.split(" ")[0].endswith(":"))

    def program(self, *, imports: str = "import kernels", before: str = "") -> Path:
        path = self.app / "program.py"
        path.write_text(PROGRAM.format(checkout=str(ROOT), imports=imports, before=before))
        return path


def plant(directory: str | Path, log: str | Path, names: tuple[str, ...] = PLANTED) -> None:
    """Plant modules that write their name to the log when they are run."""
    for name in names:
        path = Path(directory, f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import os, sys\nwith open({str(log)!r}, 'a') as log: print({name!r}, sys.argv, file=log)\n")


@pytest.fixture
def ground(tmp_path) -> Ground:
    return Ground(tmp_path)


def same_flags(parent: dict, worker: dict) -> bool:
    """Return whether a worker has its parent's flags; Python must never add the working directory to its path."""
    return worker["flags"] == {**parent["flags"], "safe_path": True}


def test_a_program_started_from_elsewhere(ground):
    """`python /app/program.py` imports nothing from the working directory, and neither does its worker."""
    ground.plant()
    parent, worker = ground.run(ground.program())
    assert worker["path"] == parent["path"]
    assert same_flags(parent, worker)


def test_an_isolated_program(ground):
    """A worker has its parent's flags and path, and finds modules from entries that the parent has removed since."""
    ground.plant()
    namespace = ground.app / "space"
    namespace.mkdir()
    (ground.app / "kernels.py").rename(namespace / "kernels.py")
    imports = f"sys.path[:0] = {str(ground.app)!r}, '/own entry'\nfrom space import kernels\ndel sys.path[0]"
    flags = ("-I", "-X", "utf8", "-B", "-Wdefault::ImportWarning")
    parent, worker = ground.run(*flags, ground.program(imports=imports))
    assert worker["path"] == parent["path"]
    assert parent["path"][0] == "/own entry"
    assert str(ground.app) not in parent["path"]
    assert same_flags(parent, worker)
    assert worker["warnings"] == parent["warnings"]


def test_a_module_started_by_name(ground):
    """`python -m` imports from the working directory, and so does the worker, after the parent's own modules.

    Modules that are planted after the parent's imports are not run, for they have not run there either.
    """
    package = ground.cwd / "service"
    ground.app.rename(package)
    ground.app = package
    ground.program(imports="from service import kernels", before=ground.plant_later)
    parent, worker = ground.run("-m", "service.program")
    assert parent["path"][0] == str(ground.cwd)
    assert worker["path"] == parent["path"]


def test_a_command(ground):
    """`python -c` has an empty entry on its path; in the worker it is the working directory of the parent."""
    code = ground.program(before=ground.plant_later).read_text()
    (ground.app / "kernels.py").rename(ground.cwd / "kernels.py")
    parent, worker = ground.run("-c", code)
    assert parent["path"][0] == ""
    assert worker["path"] == [str(ground.cwd), *parent["path"][1:]]


def test_a_program_that_changes_its_directory(ground):
    """Relative entries keep the meaning that they had when the parent started."""
    ground.plant()
    for name in ("", "more/"):
        plant(ground.cwd / "app" / name, ground.log)
    ground.environment["PYTHONPATH"] = os.pathsep.join(["app", "", "app/more"])
    program = ground.root / "program.py"
    ground.program(before=f"sys.path.insert(0, 'app')\nimport first_use\nos.chdir({str(ground.cwd)!r})").rename(program)
    (ground.app / "more").mkdir()
    (ground.app / "first_use.py").touch()
    parent, worker = ground.run(program, cwd=ground.root)
    assert parent["path"][0] == "app"
    assert worker["path"] == [str(ground.app), *parent["path"][1:]]


def test_a_location_in_pythonpath(ground):
    """Modules planted in a PYTHONPATH directory after the parent's imports run neither at the worker's start nor later.

    The worker's own child processes find modules there, as they would if the kernel ran in the parent. A sitecustomize
    that the parent ran when it started is run by the worker as well: that file, and no other.
    """
    library = ground.root / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text("")
    ground.environment["PYTHONPATH"] = os.pathsep.join([str(ground.cwd), "relative", str(library)])
    parent, worker = ground.run(ground.program(before=ground.plant_later))
    assert str(ground.cwd) in parent["path"]
    assert worker["path"] == [*parent["path"][:2], str(ground.cwd / "relative"), *parent["path"][3:]]
    assert worker["python_path"] == os.pathsep.join([str(ground.cwd), str(library)])
    assert worker["sitecustomize"] == parent["sitecustomize"] == str(library / "sitecustomize.py")


def user_site(base: Path) -> Path:
    return base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def outside_any_venv(ground: Ground) -> str:
    """Return an interpreter that uses user sites and finds the packages installed here."""
    installed = [sysconfig.get_path("purelib"), str(ROOT)]
    ground.environment["PYTHONPATH"] = os.pathsep.join(installed)
    return sys._base_executable


def test_a_user_site_that_the_parent_does_not_use(ground):
    """A user site that appears in the environment after the parent's start is not the worker's either."""
    python, base = outside_any_venv(ground), ground.cwd / "user"
    plant(user_site(base), ground.log)
    (user_site(base) / "planted.pth").write_text("import usercustomize, sitecustomize\n")
    program = ground.program(before=f"os.environ['PYTHONUSERBASE'] = {str(base)!r}")
    ground.environment["PYTHONUSERBASE"] = str(ground.root / "nothing here")
    parent, worker = ground.run(program, python=python)
    assert worker["path"] == parent["path"]


def test_a_user_site_that_the_parent_uses(ground):
    """Kernels in the parent's user site can be imported by its worker, which has the same settings."""
    python, base = outside_any_venv(ground), ground.root / "user"
    program = ground.program(before=f"os.environ['PYTHONUSERBASE'] = {str(ground.cwd)!r}")
    plant(user_site(ground.cwd), ground.log)
    user_site(base).mkdir(parents=True)
    (ground.app / "kernels.py").rename(user_site(base) / "kernels.py")
    (user_site(base) / "usercustomize.py").write_text("")
    ground.environment["PYTHONUSERBASE"] = str(base)
    parent, worker = ground.run(program, python=python)
    assert str(user_site(base)) in parent["path"]
    assert worker["path"] == parent["path"]
    assert parent["usercustomize"]
    assert worker["usercustomize"]

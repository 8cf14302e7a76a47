"""What packages of labs offer can be had, and costs nothing before."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

LABS = Path(__file__).resolve().parents[1] / "labs"
OFFERING = sorted(".".join(path.parent.relative_to(LABS.parent).parts)
                  for path in LABS.rglob("__init__.py") if "lazy_exports" in path.read_text())


@pytest.mark.parametrize("name", OFFERING)
def test_all_that_a_package_offers_is_there(name):
    package = import_module(name)
    assert all(getattr(package, offer) is not None for offer in package.__all__)
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("name", OFFERING)
def test_no_name_is_also_a_modules(name):
    package = import_module(name)
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not modules & set(package.__all__)


def test_other_names_get_one_sentence():
    with pytest.raises(AttributeError, match="labs has no 'lunch'; it offers .*launch"):
        import_module("labs").lunch  # noqa: B018


def test_importing_a_package_loads_nothing():
    code = (f"import sys, {', '.join(OFFERING)}\n"
            "print(any(name in sys.modules for name in ('torch', 'matplotlib', 'IPython')))")
    done = subprocess.run([sys.executable, "-c", code], cwd=LABS.parent, text=True,
                          capture_output=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
